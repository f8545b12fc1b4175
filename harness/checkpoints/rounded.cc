// SPDX-License-Identifier: Apache-2.0
#include "harness/checkpoints/rounded.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/base/float_bits.h"

namespace isoshard {
namespace {

float float_at(const HostTensor& tensor, std::size_t index) {
  if (tensor.dtype == Dtype::kFloat64) {
    double value = 0;
    std::memcpy(&value, tensor.bytes.data() + index * sizeof value, sizeof value);
    return static_cast<float>(value);
  }
  float value = 0;
  std::memcpy(&value, tensor.bytes.data() + index * sizeof value, sizeof value);
  return value;
}

}  // namespace

bool can_round(Dtype finer, Dtype coarser) noexcept {
  const bool has_16_bits = coarser == Dtype::kBFloat16 || coarser == Dtype::kFloat16;
  if (finer == Dtype::kFloat64) return coarser == Dtype::kFloat32 || has_16_bits;
  return finer == Dtype::kFloat32 && has_16_bits;
}

HostTensor rounded(const HostTensor& tensor, Dtype dtype) {
  const auto count = static_cast<std::size_t>(tensor.numel());
  const auto bytes = std::make_shared<std::vector<std::byte>>(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const float value = float_at(tensor, i);
    if (dtype == Dtype::kFloat32) {
      std::memcpy(bytes->data() + i * sizeof value, &value, sizeof value);
      continue;
    }
    const std::uint16_t bits =
        dtype == Dtype::kBFloat16 ? float_to_bf16(value) : float_to_fp16(value);
    std::memcpy(bytes->data() + i * sizeof bits, &bits, sizeof bits);
  }
  return {dtype, tensor.shape, *bytes, bytes};
}

}  // namespace isoshard
