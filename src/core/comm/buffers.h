// SPDX-License-Identifier: Apache-2.0
/// What every backend does with buffers: sizes in bytes, copies, and the check of what a caller
/// hands in.
#pragma once
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/base/dtype.h"
#include "core/base/error.h"
#include "core/comm/communicator.h"

namespace isoshard {

[[nodiscard]] inline std::size_t bytes_of(std::int64_t count, Dtype dtype) {
  return static_cast<std::size_t>(count) * size_of(dtype);
}

/// Ranges may overlap; nothing happens for 0 bytes or a copy onto itself.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memmove(to, from, bytes);
}

/// Errors   UsageError for memory that is not the host's, or a stream.
inline void check_on_host(const ConstBuffer& buffer, const char* op, const char* name) {
  if (buffer.device == Device{} && buffer.stream == nullptr) return;
  throw UsageError(fmt::format(
      "{}: {} must be in host memory and on no stream, got {}{}; copy it to the host first", op,
      name, name_of(buffer.device), buffer.stream != nullptr ? " on a stream" : ""));
}

/// Errors   as check_on_host; ShapeError for a negative count, or for elements at no address.
inline void check_buffer(const ConstBuffer& buffer, const char* op, const char* name) {
  check_on_host(buffer, op, name);
  if (buffer.count < 0 || (buffer.count > 0 && buffer.data == nullptr)) {
    throw ShapeError(fmt::format(
        "{}: the {} must have a count of at least 0 and an address, got {} elements at {}", op,
        name, buffer.count, static_cast<const void*>(buffer.data)));
  }
}

}  // namespace isoshard
