// SPDX-License-Identifier: Apache-2.0
/// What a bundle says of tensors that ranks compared with the reference and did not keep
/// (docs/reference/bundle.md), and of filters.
#pragma once
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "harness/bundle/bundle.h"

namespace isoshard::detail {

/// The parts' statistics: a list in the order of parts; numbers that are 0 are left out.
[[nodiscard]] nlohmann::json statistics_json(const Record& record);

/// Puts the list into the record's parts.
/// Errors   FileError that starts with `file`: malformed, or not as many as there are parts.
void fill_statistics(Record& record, const nlohmann::json& list, const std::filesystem::path& file);

/// The name of a record's samples in its safetensors file: sample/KIND/NAME/CALL.
[[nodiscard]] std::string sample_name(const RecordKey& key);

/// SHA-256 of what Bundle::digest is of.
/// Requires   "files" is an object.
[[nodiscard]] std::string digest_of_manifest(const nlohmann::json& manifest);

/// The fields of manifest.json. Errors   FileError that starts with `file` if one is malformed.
[[nodiscard]] std::optional<ComparedWith> compared_with_of(const nlohmann::json& manifest,
                                                           const std::filesystem::path& file);
[[nodiscard]] std::optional<Filtered> filtered_of(const nlohmann::json& manifest,
                                                  const std::filesystem::path& file);

}  // namespace isoshard::detail
