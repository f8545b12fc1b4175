// SPDX-License-Identifier: Apache-2.0
/// What a comparison would have rejected: a tolerance is worth as much as the smallest wrong it
/// shows.
#pragma once
#include <string>

#include "core/base/dtype.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// Whether a tensor is an optimizer's second moment, "<parameter>.<name>_sq": it holds squares of
/// gradients.
[[nodiscard]] bool is_second_moment(const RecordKey& key) noexcept;

/// The largest scale error that a tolerance may make of an order of summands, or of the squares of
/// gradients: 1e-9 in fp64, 1e-3 in fp32, 0.5 in bf16 and fp16 (docs/internals/calibration.md has
/// what clean runs show). In a second moment a factor 1 + c of gradients stands as (1 + c)^2.
[[nodiscard]] double scale_ceiling(const RecordKey& key, Dtype coarsest) noexcept;

/// The largest scale error that a comparison at level perturbed may overlook before the verdict is
/// vacuous: scale_ceiling(), and in fp64 that of fp32. A verdict in fp64 must show what one in fp32
/// must, and may show less than 1e-9 where a step of Adam with a tiny eps is the sign of noise.
[[nodiscard]] double weakness_ceiling(const RecordKey& key, Dtype coarsest) noexcept;

/// The relative Frobenius distance of the reference's tensor from a copy of itself that is rolled
/// by one place (element i holds element i - 1, the first the last); 0 for a single number. Of a
/// large tensor the first elements are measured.
[[nodiscard]] double rolled_error(const Reference& reference, const Record& record);

/// What the comparison, at level perturbed, would have said to a rolled copy of the reference.
/// `response` is the tensor's largest relative response.
[[nodiscard]] ShiftedCopy judged_shifted_copy(const TensorComparison& comparison, double k,
                                              Dtype coarsest, double response) noexcept;

/// Why an insensitive gradient of a parameter shows too little: what it is allowed is above the
/// ceiling's share of the largest tensor of its kind (`largest_norm`), so that a value which
/// matters would pass as noise. Empty for others.
[[nodiscard]] std::string weakness_of_noise(const TensorComparison& comparison, double largest_norm,
                                            Dtype coarsest);

/// Why the comparison shows too little: its scale sensitivity is above the ceiling, or a rolled
/// copy would pass. Empty if it shows enough, is insensitive (judged by its absolute error, and
/// listed), or is not at level perturbed.
/// Requires   rolled_copy is set.
[[nodiscard]] std::string weakness(const TensorComparison& comparison, Dtype coarsest);

}  // namespace isoshard
