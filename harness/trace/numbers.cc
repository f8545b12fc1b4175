// SPDX-License-Identifier: Apache-2.0
/// One loop a dtype.
#include "harness/trace/numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/base/error.h"
#include "core/base/float_bits.h"
#include "harness/stats/stats.h"

namespace isoshard {
namespace {

/// Calls convert(type) with a value of the type that holds an element of this dtype.
template <class Convert>
void with_type_of(Dtype dtype, Convert&& convert) {
  switch (dtype) {
    case Dtype::kFloat64:
      return convert(double{});
    case Dtype::kFloat32:
      return convert(float{});
    case Dtype::kBFloat16:
    case Dtype::kFloat16:
      return convert(std::uint16_t{});
    case Dtype::kInt64:
      return convert(std::int64_t{});
    case Dtype::kInt32:
      return convert(std::int32_t{});
    case Dtype::kInt16:
      return convert(std::int16_t{});
    case Dtype::kInt8:
      return convert(std::int8_t{});
    case Dtype::kUint8:
    case Dtype::kBool:
      return convert(std::uint8_t{});
  }
}

}  // namespace

std::vector<double> numbers_of(const HostTensor& tensor) {
  std::vector<double> numbers(static_cast<std::size_t>(tensor.numel()));
  with_type_of(tensor.dtype, [&]<class T>(T element) {
    const std::byte* from = tensor.bytes.data();
    for (double& number : numbers) {
      std::memcpy(&element, from, sizeof(T));
      from += sizeof(T);
      if (tensor.dtype == Dtype::kBFloat16) {
        number = static_cast<double>(bf16_to_float(static_cast<std::uint16_t>(element)));
      } else if (tensor.dtype == Dtype::kFloat16) {
        number = static_cast<double>(fp16_to_float(static_cast<std::uint16_t>(element)));
      } else if (tensor.dtype == Dtype::kBool) {
        number = element != 0 ? 1 : 0;
      } else {
        number = static_cast<double>(element);
      }
    }
  });
  return numbers;
}

bool is_nonzero(const HostTensor& tensor) {
  return std::ranges::any_of(numbers_of(tensor), [](double number) { return number != 0; });
}

double number_of(const HostTensor& tensor) {
  if (tensor.numel() != 1)
    throw VacuousError(fmt::format("a scalar record must have 1 element, got {}", tensor.numel()));
  return value_at(tensor.bytes.data(), tensor.dtype, 0);
}

std::vector<std::byte> bytes_of(std::span<const double> numbers, Dtype dtype) {
  std::vector<std::byte> bytes(numbers.size() * size_of(dtype));
  with_type_of(dtype, [&]<class T>(T element) {
    std::byte* to = bytes.data();
    for (const double number : numbers) {
      if (dtype == Dtype::kBFloat16) {
        element = static_cast<T>(float_to_bf16(static_cast<float>(number)));
      } else if (dtype == Dtype::kFloat16) {
        element = static_cast<T>(float_to_fp16(static_cast<float>(number)));
      } else if (dtype == Dtype::kBool) {
        element = static_cast<T>(number != 0 ? 1 : 0);
      } else {
        element = static_cast<T>(number);
      }
      std::memcpy(to, &element, sizeof(T));
      to += sizeof(T);
    }
  });
  return bytes;
}

}  // namespace isoshard
