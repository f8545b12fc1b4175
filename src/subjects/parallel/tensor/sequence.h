// SPDX-License-Identifier: Apache-2.0
/// Activations that are split over tp ranks along the sequence, and the operations between the
/// parts and the whole.
#pragma once
#include <ATen/core/Tensor.h>

#include <string_view>

#include "core/comm/communicator.h"

namespace isoshard {

/// Forward returns the whole sequence. Backward returns this rank's part of the sum of the ranks'
/// gradients, in the gradient's dtype.
///
/// Shapes   [B, S / tp, ...] -> [B, S, ...]; rank r has the r-th part of every sample's sequence.
/// Ranks    collective over `tp` (sequence.gather), backward too (sequence.scatter); one segment,
///          named `module`.
/// `tp` must outlive the autograd graph.   Source   Korthikanti et al., Reducing Activation
/// Recomputation (2022), section 4.2.2: g.
[[nodiscard]] at::Tensor gathered_sequence(const at::Tensor& own, Communicator& tp,
                                           std::string_view module);

/// Forward returns this rank's part of the sum of the ranks' summands, in their dtype. Backward
/// returns the gradient of the whole sequence.
///
/// Shapes   [B, S, ...] -> [B, S / tp, ...].   Errors   ShapeError if tp does not divide S.
/// Ranks    collective over `tp` (sequence.scatter), backward too (sequence.gather); one segment,
///          named `module`.
/// `tp` must outlive the autograd graph.   Source   as gathered_sequence: g bar.
[[nodiscard]] at::Tensor scattered_sequence_sum(const at::Tensor& partial, Communicator& tp,
                                                std::string_view module);

/// This rank's part of dim 1.   Errors   ShapeError if tp does not divide it.   Ranks   local.
[[nodiscard]] at::Tensor own_part_of_sequence(const at::Tensor& whole, const Communicator& tp);

}  // namespace isoshard
