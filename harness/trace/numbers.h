// SPDX-License-Identifier: Apache-2.0
/// The elements of a tensor in fp64, and back.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/base/host_tensor.h"

namespace isoshard {

/// Exact, but for an int64 beyond 2^53.
[[nodiscard]] std::vector<double> numbers_of(const HostTensor& tensor);

/// Whether any element is not 0, as NaN is not.
[[nodiscard]] bool is_nonzero(const HostTensor& tensor);

/// The one element of a tensor.   Errors   VacuousError for any other number of elements.
[[nodiscard]] double number_of(const HostTensor& tensor);

/// Rounded to the dtype to nearest, to 16 bits by way of fp32; integers are truncated.
[[nodiscard]] std::vector<std::byte> bytes_of(std::span<const double> numbers, Dtype dtype);

}  // namespace isoshard
