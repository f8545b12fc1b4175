// SPDX-License-Identifier: Apache-2.0
/// Records and responses as the JSON of a bundle.
#pragma once
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>

#include "harness/trace/reference.h"

namespace isoshard::detail {

[[nodiscard]] nlohmann::json key_json(const RecordKey& key);
[[nodiscard]] nlohmann::json to_json(const Record& record);
[[nodiscard]] nlohmann::json to_json(const MeshShape& mesh);
[[nodiscard]] nlohmann::json to_json(const std::map<RecordKey, Response>& responses, int runs);

/// Errors   FileError that starts with `file`: a field is missing, of another type, or out of
///          range.
[[nodiscard]] RecordKey key_of(const nlohmann::json& json, const std::filesystem::path& file);
[[nodiscard]] Record record_of(const nlohmann::json& json, const std::filesystem::path& file);
[[nodiscard]] MeshShape mesh_of(const nlohmann::json& json, const std::filesystem::path& file);
[[nodiscard]] std::map<RecordKey, Response> responses_of(const nlohmann::json& json,
                                                         const std::filesystem::path& file,
                                                         int& runs);

/// The field, checked. Errors as above.
template <class T>
[[nodiscard]] T field(const nlohmann::json& json, const char* name,
                      const std::filesystem::path& file);

/// A text that reports show: no control characters. Errors as above.
[[nodiscard]] std::string text_field(const nlohmann::json& json, const char* name,
                                     const std::filesystem::path& file);

/// kind/name/call: the tensor's name in its safetensors file.
[[nodiscard]] std::string tensor_name(const RecordKey& key);

}  // namespace isoshard::detail
