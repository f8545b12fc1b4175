// SPDX-License-Identifier: Apache-2.0
/// Strict reading of JSON text that may come from anywhere.
#pragma once
#include <cstddef>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string_view>

namespace isoshard {

/// What a text may cost at most.
struct JsonLimits {
  std::size_t max_bytes = std::size_t{64} << 20;
  std::size_t max_depth = 64;  ///< nested arrays and objects
  /// Objects, arrays, strings, numbers and literals together.
  std::size_t max_values = std::size_t{1} << 18;
};

/// Parses one JSON value (RFC 8259, UTF-8) and nothing but white space around it.
///
/// `path` is only named in errors. Numbers beyond 64-bit integers become floating point.
/// Errors   FileError that starts with the path: malformed text (with the byte), a byte-order mark,
///          bytes that are not UTF-8, a duplicate key in one object, numbers beyond double, or a
///          limit exceeded.
[[nodiscard]] nlohmann::json parse_json(std::string_view text, const std::filesystem::path& path,
                                        const JsonLimits& limits = {});

/// Errors   as parse_json; FileError too if the file is missing, unreadable or no regular file.
[[nodiscard]] nlohmann::json read_json_file(const std::filesystem::path& path,
                                            const JsonLimits& limits = {});

}  // namespace isoshard
