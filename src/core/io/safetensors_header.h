// SPDX-License-Identifier: Apache-2.0
/// The rules of a safetensors header: shared by reader and writer.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "core/io/safetensors.h"

namespace isoshard::detail {

inline constexpr std::size_t kLengthBytes = 8;
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // as the reference implementation
inline constexpr std::string_view kMetadataKey = "__metadata__";

struct SafetensorsHeader {
  std::map<std::string, SafetensorsInfo, std::less<>> infos;
  std::map<std::string, std::string> metadata;
  std::size_t data_begin = 0;  ///< in bytes from the start of the file
};

/// "" for an acceptable tensor name, else what is wrong with it.
[[nodiscard]] std::string name_problem(std::string_view name);

/// Checks everything that can be checked without reading tensors.
/// Errors   FileError, see SafetensorsFile.
[[nodiscard]] SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file,
                                                         const std::filesystem::path& path);

}  // namespace isoshard::detail
