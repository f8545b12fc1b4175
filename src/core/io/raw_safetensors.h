// SPDX-License-Identifier: Apache-2.0
/// Test helper: safetensors files put together byte by byte, right or wrong.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace isoshard {

/// The eight bytes of a little-endian length.
[[nodiscard]] inline std::string length_bytes(std::uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xff);
  return bytes;
}

/// Length, header, data.
[[nodiscard]] inline std::string raw_safetensors(std::string_view header,
                                                 std::string_view data = {}) {
  return length_bytes(header.size()).append(header).append(data);
}

}  // namespace isoshard
