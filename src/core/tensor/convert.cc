// SPDX-License-Identifier: Apache-2.0
/// Dtypes, views and owners.
#include "core/tensor/convert.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <array>
#include <utility>

#include "core/base/error.h"

namespace isoshard {
namespace {

constexpr std::array<std::pair<at::ScalarType, Dtype>, 10> kDtypes = {
    {{at::kDouble, Dtype::kFloat64},
     {at::kFloat, Dtype::kFloat32},
     {at::kBFloat16, Dtype::kBFloat16},
     {at::kHalf, Dtype::kFloat16},
     {at::kLong, Dtype::kInt64},
     {at::kInt, Dtype::kInt32},
     {at::kShort, Dtype::kInt16},
     {at::kChar, Dtype::kInt8},
     {at::kByte, Dtype::kUint8},
     {at::kBool, Dtype::kBool}}};

}  // namespace

Dtype dtype_of(const at::Tensor& tensor) {
  for (const auto& [scalar_type, dtype] : kDtypes) {
    if (tensor.scalar_type() == scalar_type) return dtype;
  }
  throw ShapeError(fmt::format(
      "the dtype of a tensor must be fp64, fp32, bf16, fp16, int64, int32, int16, int8, "
      "uint8 or bool, got {}",
      c10::toString(tensor.scalar_type())));
}

at::ScalarType scalar_type_of(Dtype dtype) noexcept {
  for (const auto& [scalar_type, known] : kDtypes) {
    if (known == dtype) return scalar_type;
  }
  return at::ScalarType::Undefined;
}

at::Tensor tensor_of(const HostTensor& tensor) {
  const at::TensorOptions options = at::TensorOptions().dtype(scalar_type_of(tensor.dtype));
  if (tensor.bytes.empty()) return at::empty(tensor.shape, options);
  // ATen has no read-only tensors.
  void* const address = const_cast<std::byte*>(tensor.bytes.data());
  return at::from_blob(
      address, tensor.shape, [owner = tensor.owner](void*) {}, options);
}

HostTensor host_tensor_of(const at::Tensor& tensor) {
  auto packed = std::make_shared<const at::Tensor>(
      tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous());
  const std::span bytes(static_cast<const std::byte*>(packed->const_data_ptr()), packed->nbytes());
  return {dtype_of(*packed), packed->sizes().vec(), bytes, packed};
}

}  // namespace isoshard
