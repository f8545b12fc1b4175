// SPDX-License-Identifier: Apache-2.0
/// What the responses of other tensors say about how far one tensor may be off, where its own say
/// too little (docs/internals/tolerances.md).
#pragma once
#include <string_view>

#include "core/base/dtype.h"
#include "harness/trace/masked_steps.h"
#include "harness/trace/reference.h"

namespace isoshard {

/// Which state of the optimizer a record holds: "exp_avg"; empty for other kinds. A
/// view of the key's name.
[[nodiscard]] std::string_view state_of(const RecordKey& key) noexcept;

/// For an optimizer's second moments, "<parameter>.<name>_sq": the relative Frobenius error that
/// gradients within their tolerances may make of the sum of their squares; 0 for every other
/// tensor, and where the gradients were not recorded.
///
/// With ||d|| <= E ||g||: ||(g + d)^2 - g^2|| <= 2 max|g| ||d|| to first order, relative to ||g^2||
/// at most 2 E times the quotient of both peaks (max abs / norm of g^2 and of g); E^2 more as for
/// an error in proportion to g. Errors of several steps are taken as independent.
[[nodiscard]] double error_of_squares(const Reference& reference, const RecordKey& key, double k,
                                      Dtype coarsest);

/// The relative Frobenius error that the tensors which feed this one may make of it, at most the
/// ceiling of a scale error; 0 where nothing is known. In 16 bits the first of these alone:
/// - tensors and gradients of few independent elements (`error_of_few_elements`);
/// - the gradient of a bias, which is a sum over rows (`error_of_summed_rows`);
/// - states of the optimizer that are linear in gradients: the relative error of each step's
///   gradient, as far as it is not larger than the state;
/// - parameters after a step without a mask (SGD): the relative error of the momentum buffer, or of
///   the gradient where there is none, times the length of the step over that of the parameter.
[[nodiscard]] double error_of_neighbours(const Reference& reference, const RecordKey& key, double k,
                                         Dtype coarsest);

/// The relative error that few independent elements may have, of which responses say little. All
/// gradients of a step are multiples of what its backward pass begins with: where that is one
/// number, one rounding moves all of them. A softmax makes an absolute error of logits a relative
/// one of that gradient. In 16 bits it is 0 but for tensors of fewer than 15 elements that are no
/// squares, and only their own elements count.
[[nodiscard]] double error_of_few_elements(const Reference& reference, const RecordKey& key,
                                           double k, Dtype coarsest);

/// For the gradient of a bias: the relative error that the roundings of its summands make, 0 for
/// every other tensor. It is the sum over all rows of the gradient at its module's output. Errors
/// of rows are taken as independent, so the sum has the norm of the summands' error, however much
/// of the summands cancels.
[[nodiscard]] double error_of_summed_rows(const Reference& reference, const RecordKey& key,
                                          double k, Dtype coarsest);

/// For the loss: the Frobenius norm of the error that the roundings of its logits make, 0 for every
/// other record. Logits are the activation whose gradient the backward pass begins with. To first
/// order, errors d of n logits make sum g d of it, at most ||g|| ||d||, and 4 / sqrt(n) of that
/// where they are independent. The logarithm of a softmax is also rounded to the digits of a logit,
/// and to those of the sum of exponentials, which is at least 1.
[[nodiscard]] double error_of_loss(const Reference& reference, const RecordKey& key, double k,
                                   Dtype coarsest);

/// The largest norm of the reference's tensors of this kind (of optimizer states, of this state) in
/// this step; 0 if there is none.
[[nodiscard]] double largest_norm_of_kind(const Reference& reference, const RecordKey& key);

/// Frobenius norm of the noise in a tensor that is 0 in exact arithmetic: r roundoffs of the
/// accumulator (fp32 for 16-bit dtypes) of the largest tensor of its kind in its step; of second
/// moments the square of that. r as in responses_allowed.
[[nodiscard]] double cancellation_noise(const Reference& reference, const RecordKey& key, double k,
                                        Dtype coarsest);

}  // namespace isoshard
