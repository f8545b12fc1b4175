// SPDX-License-Identifier: Apache-2.0
// docs/internals/tolerances.md derives every number here.
#include "harness/verdict/tensor_tolerance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "harness/stats/tolerance.h"
#include "harness/trace/masked_steps.h"
#include "harness/trace/numbers.h"
#include "harness/trace/stage.h"
#include "harness/verdict/neighbours.h"
#include "harness/verdict/sensitivity.h"

namespace isoshard::detail {
namespace {

/// A run clips by its own norm, which may be off by as much as it is allowed to, and rounds once
/// more. In fp16 a small factor leaves subnormal numbers.
void allow_error_of_norm(TensorComparison& c, const ToleranceInputs& in) {
  const RecordKey key = scalar_key(in.wanted.key.step, NameRole::kGradNorm);
  const Response* response = in.reference.response(key);
  const double whole = std::sqrt(c.stats.sum_sq_reference);
  const double underflow = underflow_floor(in.options.k, in.options.coarsest, c.stats.numel) *
                           in.wanted.grad_scale / in.held.grad_scale;
  double error = unit_roundoff(in.options.coarsest) + (whole > 0 ? underflow / whole : 0);
  if (response != nullptr) {
    const double norm = std::fabs(number_of(in.reference.tensor(key)));
    error +=
        perturbed_tolerance(*response, in.options.k, in.options.coarsest, 1, norm).relative_error;
  }
  c.allowed_relative_error += error;
  c.allowed_scale_error += error;
  c.allowed_absolute += whole > 0 ? error * whole : underflow;
  c.scale_sensitivity = std::min(c.allowed_relative_error, c.allowed_scale_error);
}

/// The farthest that an element of a parameter moved in each step before `end`; empty: one of them
/// was not recorded.
std::vector<double> largest_moves(const Reference& reference, const std::string& name, int end) {
  std::vector<double> moves;
  const Record* before = reference.find({0, RecordKind::kParam, name, 0});
  for (int step = 0; step < end; ++step) {
    const Record* after = reference.find({step, RecordKind::kParam, name, step == 0 ? 1 : 0});
    if (before == nullptr || after == nullptr) return {};
    Stats moved;
    accumulate(moved, reference.bytes(*before), before->dtype, reference.bytes(*after),
               after->dtype, numel_of(after->layout.global_shape), 0);
    moves.push_back(moved.max_abs);
    before = after;
  }
  return moves;
}

/// Frobenius norm of the error that masked steps may make: step_floor of the largest step, in
/// each element and step.
double step_error(const TensorComparison& c, const ToleranceInputs& in) {
  const double floor = step_floor(in.options.coarsest);
  const std::string name(stepped_parameter(in.wanted.key));
  if (floor == 0 || !in.is_masked || name.empty()) return 0;
  const std::vector<double> moves = largest_moves(in.reference, name, in.wanted.key.step + 1);
  return std::accumulate(moves.begin(), moves.end(), 0.0) * floor *
         std::sqrt(static_cast<double>(c.stats.numel));
}

/// How far the reference's step moved the elements that are compared, and how many of them.
struct Moved {
  double sum_sq = 0;
  std::int64_t elements = 0;
};

Moved moved_by_step(const Record& before, const ToleranceInputs& in) {
  const std::byte* from = in.reference.bytes(before);
  const std::byte* to = in.reference.bytes(in.wanted);
  const std::int64_t numel = numel_of(in.wanted.layout.global_shape);
  if (!in.is_masked) {
    Stats step;
    accumulate(step, from, before.dtype, to, in.wanted.dtype, numel, 0);
    return {step.sum_sq_diff, step.unequal_values};
  }
  const ElementClaims claims =
      MaskedSteps(in.reference, in.options).of_parameter(in.wanted, /*own_max_abs=*/{});
  Moved moved;
  for (std::int64_t i = 0; i < numel; ++i) {
    if (!claims.compared.empty() && claims.compared[static_cast<std::size_t>(i)] == 0) continue;
    const double by = value_at(to, in.wanted.dtype, i) - value_at(from, before.dtype, i);
    moved.sum_sq += by * by;
    if (by != 0) ++moved.elements;
  }
  return moved;
}

/// The largest relative error that gradients of a parameter may have in the steps so far. Infinite
/// where one of them is below its noise, or where the reference has none.
double error_of_gradients(const std::string& name, const ToleranceInputs& in) {
  constexpr double kEverything = std::numeric_limits<double>::infinity();
  double largest = -1;
  for (int step = 0; step <= in.wanted.key.step; ++step) {
    const RecordKey key{step, RecordKind::kGrad, name, 0};
    const Record* gradient = in.reference.find(key);
    const Response* response = in.reference.response(key);
    if (gradient == nullptr || response == nullptr) continue;  // before a run that was resumed
    const PerturbedTolerance allowed =
        perturbed_tolerance(*response, in.options.k, in.options.coarsest,
                            numel_of(gradient->layout.global_shape), response->reference_norm);
    if (allowed.insensitive) return kEverything;
    largest = std::max(largest, allowed.relative_error);
  }
  return largest < 0 ? kEverything : largest;
}

/// Frobenius norm of the error that a parameter or its master may have for its last step to be
/// seen: a run that left the step out has, besides what it had before, an error as large as the
/// step. Infinite where what is legal is as large as that, or where too few elements moved to say.
///
/// Runs with moved weights are no measure of it in 16 bits: they begin an ulp away, which may be
/// ten times the step. docs/internals/tolerances.md ("Steps that are seen") derives the numbers.
double error_of_seen_step(const TensorComparison& c, const ToleranceInputs& in) {
  constexpr double kShare = 0.6, kShareOfRounded = 0.75;
  constexpr double kEverything = std::numeric_limits<double>::infinity();
  constexpr std::int64_t kFewest = 64;
  const RecordKey& key = in.wanted.key;
  const std::string name(stepped_parameter(key));
  if (name.empty() || size_of(in.options.coarsest) != 2 || !in.reference.has_bytes() ||
      !std::isfinite(in.error_before))
    return kEverything;
  const Record* before = in.reference.find(before_step(key));
  if (before == nullptr || before->layout.global_shape != in.wanted.layout.global_shape)
    return kEverything;
  const Moved step = moved_by_step(*before, in);
  if (step.elements < kFewest) return kEverything;
  const double size = std::sqrt(step.sum_sq);
  const bool is_rounded = size_of(in.held.dtype) == 2;
  double legal = (is_rounded ? kShareOfRounded : kShare) * size;
  // Elements that a mask leaves have steps above what the responses show.
  if (!in.is_masked) legal = std::max(legal, error_of_gradients(name, in) * size);
  if (!is_rounded) {
    legal = std::max(legal, 2 * unit_roundoff(in.held.dtype) * std::sqrt(c.stats.sum_sq_reference));
  }
  const double allowed = in.error_before + legal;
  return allowed < std::hypot(in.error_before, size) ? allowed : kEverything;
}

/// Of a parameter or a master in 16 bits: whether the reference's last step moved it at all.
bool is_moved_by_step(const ToleranceInputs& in) {
  const Record* before = stepped_parameter(in.wanted.key).empty()
                             ? nullptr
                             : in.reference.find(before_step(in.wanted.key));
  if (before == nullptr || size_of(in.options.coarsest) != 2 || !in.reference.has_bytes() ||
      before->layout.global_shape != in.wanted.layout.global_shape)
    return false;
  Stats step;
  accumulate(step, in.reference.bytes(*before), before->dtype, in.reference.bytes(in.wanted),
             in.wanted.dtype, numel_of(in.wanted.layout.global_shape), 0);
  return step.unequal_values > 0;
}

/// What is put together from summands was added up in another order than by the run, and may differ
/// by that where everything else must be equal, too. No more than a comparison may let pass: large
/// summands that cancel are no licence.
void allow_error_of_order(TensorComparison& c, const ToleranceInputs& in) {
  const double norm = std::sqrt(c.stats.sum_sq_reference);
  const double most = scale_ceiling(in.wanted.key, in.options.coarsest);
  const double error = norm > 0 ? std::min(in.order_error / norm, most) : 0;
  if (c.level == Level::kExact) c.level = Level::kBounded;
  if (norm == 0) c.insensitive = true;
  c.allowed_relative_error += error;
  c.allowed_scale_error += error;
  c.allowed_absolute += norm > 0 ? error * norm : in.order_error;
  c.scale_sensitivity = std::min(c.allowed_relative_error, c.allowed_scale_error);
}

/// After a step of Adam, whose sign turns with a rounding where a gradient is noise, few runs with
/// moved weights say too little: redrawn runs count as well.
Response with_redrawn(Response response, const ToleranceInputs& in) {
  const RecordKey& key = in.response_of;
  const auto found = in.reference.redrawn().sums.find(key);
  const bool is_after_step = key.step > 0 && !in.is_masked && size_of(in.options.coarsest) == 2;
  if (!is_after_step || found == in.reference.redrawn().sums.end() ||
      !(response.reference_norm > 0))
    return response;
  for (const RedrawnSums& run : found->second) {
    const double norm = std::sqrt(run.sum_sq_diff), of = response.reference_norm;
    response.relative_error = std::max(response.relative_error, norm / of);
    response.scale_error = std::max(response.scale_error, std::fabs(run.dot_diff) / (of * of));
    response.absolute_norm = std::max(response.absolute_norm, norm);
  }
  return response;
}

SetTolerance set_own_tolerance(TensorComparison& c, const ToleranceInputs& in) {
  SetTolerance set;
  // counts, tables and flags have no rounding that a tolerance could be for
  const bool is_whole = (in.options.rtol.has_value() && !is_floating(in.wanted.dtype)) ||
                        role_of(in.wanted.key) == NameRole::kFoundInf;
  if (is_exact(c.stage) || in.options.level == Level::kExact || is_whole) {
    c.level = Level::kExact;
    return set;
  }
  if (in.options.rtol.has_value()) {
    c.level = Level::kReported;
    c.allowed_relative_error = c.allowed_scale_error = c.scale_sensitivity = *in.options.rtol;
    return set;
  }
  c.level = in.options.level;
  const Response* const response = in.reference.response(in.response_of);
  if (response == nullptr) {
    set.not_judged = said(RuleId::kResponseMissing, {{"tensor", describe(in.wanted.key)}});
    return set;
  }
  const double norm = std::sqrt(c.stats.sum_sq_reference);
  // A mask may leave an element or two of a tensor.
  const double k = in.options.k * (in.is_masked ? few_elements_factor(c.stats.numel) : 1);
  const Response moved = with_redrawn(*response, in);
  const PerturbedTolerance tolerance =
      perturbed_tolerance(moved, k, in.options.coarsest, c.stats.numel, norm);
  const double stepping = norm > 0 ? step_error(c, in) / norm : 0;
  // The worst that squares may make, but no more than a comparison may let pass: what follows
  // from gradients is no licence.
  const double squares =
      std::min(error_of_squares(in.reference, in.wanted.key, in.options.k, in.options.coarsest),
               scale_ceiling(in.wanted.key, in.options.coarsest));
  // One rounding of what many elements are multiplied with lies along the reference.
  const double neighbours = in.is_masked ? 0
                                         : error_of_neighbours(in.reference, in.wanted.key,
                                                               in.options.k, in.options.coarsest);
  c.allowed_relative_error = std::max({tolerance.relative_error, stepping, squares, neighbours});
  c.allowed_scale_error = std::max(
      {tolerance.scale_error, stepping, tolerance.part_along_reference * squares, neighbours});
  const double seen = error_of_seen_step(c, in);
  set.hides_step = std::isinf(seen) && is_moved_by_step(in);
  if (norm > 0) c.allowed_relative_error = std::min(c.allowed_relative_error, seen / norm);
  // Where reference and responses are 0, a run that is not can only have noise, or an error:
  // nothing is relative to 0.
  c.insensitive = tolerance.insensitive ||
                  (norm == 0 && response->absolute_norm == 0 && c.stats.unequal_values != 0);
  const double of_loss =
      error_of_loss(in.reference, in.wanted.key, in.options.k, in.options.coarsest);
  if (of_loss > weakness_ceiling(in.wanted.key, in.options.coarsest) * norm) {
    c.insensitive = true;
  } else if (norm > 0) {
    c.allowed_relative_error = std::max(c.allowed_relative_error, of_loss / norm);
    c.allowed_scale_error = std::max(c.allowed_scale_error, of_loss / norm);
  }
  c.subnormal = tolerance.subnormal;
  // One rounding of a subnormal number moves all that is multiplied by it alike.
  if (c.subnormal) c.allowed_scale_error = c.allowed_relative_error;
  c.allowed_absolute = c.insensitive
                           ? std::max({tolerance.absolute, of_loss,
                                       cancellation_noise(in.reference, in.wanted.key, in.options.k,
                                                          in.options.coarsest)})
                           : tolerance.absolute;
  c.allowed_absolute = std::min(c.allowed_absolute, seen);
  c.scale_sensitivity = c.insensitive ? (norm > 0 ? c.allowed_absolute / norm : 0)
                                      : std::min(c.allowed_relative_error, c.allowed_scale_error);
  // What it shows too little of, its gradient or its sum shows as well.
  if (role_of(in.wanted.key) == NameRole::kClipped && in.response_of != in.wanted.key)
    allow_error_of_norm(c, in);
  if (in.response_of != in.wanted.key) return set;
  if (role_of(in.wanted.key) == NameRole::kMicroBatch)
    return set;  // the final gradient shows it as well
  c.rolled_error = rolled_error(in.reference, in.wanted);
  c.rolled_copy =
      judged_shifted_copy(c, in.options.k, in.options.coarsest, response->relative_error);
  c.weakness = c.insensitive
                   ? weakness_of_noise(c, largest_norm_of_kind(in.reference, in.wanted.key),
                                       in.options.coarsest)
                   : weakness(c, in.options.coarsest);
  return set;
}

}  // namespace

SetTolerance set_tolerance(TensorComparison& c, const ToleranceInputs& in) {
  SetTolerance set = set_own_tolerance(c, in);
  if (set.not_judged.empty() && in.order_error > 0) allow_error_of_order(c, in);
  return set;
}

bool within_tolerance(const TensorComparison& c, const Stats& stats, double share) noexcept {
  if (stats.nonfinite_mismatch != 0) return false;
  if (stats.unequal_values == 0) return true;
  if (c.level == Level::kExact) return false;
  if (c.insensitive) return std::sqrt(stats.sum_sq_diff) <= c.allowed_absolute * std::sqrt(share);
  const double whole = c.stats.sum_sq_reference;
  return stats.sum_sq_diff <= c.allowed_relative_error * c.allowed_relative_error * whole * share &&
         std::fabs(stats.dot - stats.sum_sq_reference) <= c.allowed_scale_error * whole * share;
}

}  // namespace isoshard::detail
