// SPDX-License-Identifier: Apache-2.0
/// Element types of buffers, traces and files, without ATen.
#pragma once
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string_view>

namespace isoshard {

enum class Dtype : std::uint8_t {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUint8,
  kBool
};

/// Bytes of one element.
[[nodiscard]] std::size_t size_of(Dtype dtype) noexcept;

[[nodiscard]] bool is_floating(Dtype dtype) noexcept;

/// Half the distance from 1 to the next larger value: 2^-53, 2^-24, 2^-8, 2^-11; 0 for integers and
/// bool.
[[nodiscard]] double unit_roundoff(Dtype dtype) noexcept;

/// The user's name: fp64, fp32, bf16, fp16, int64, ..., bool.
[[nodiscard]] std::string_view name_of(Dtype dtype) noexcept;
/// The same, in messages of GoogleTest.
void PrintTo(Dtype dtype, std::ostream* out);

/// The name in a safetensors header: F64, F32, BF16, F16, I64, I32, I16, I8, U8, BOOL.
[[nodiscard]] std::string_view safetensors_name_of(Dtype dtype) noexcept;

/// Parses a user's name; `float32`, `bfloat16`, `half` and `torch.float32` and the like are
/// accepted too.
/// Errors   UsageError that lists the names.
[[nodiscard]] Dtype parse_dtype(std::string_view name);

}  // namespace isoshard
