// SPDX-License-Identifier: Apache-2.0
/// Whether a curve agrees with the reference's within the effects of rounding.
/// docs/internals/curves.md derives the bounds.
///
/// Words. The *spread* of a step is the largest difference between the reference and its perturbed
/// runs in that step; the *envelope* is the largest spread up to that step. Runs that differ by
/// roundings only drift apart from step to step, and the envelope says how far.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/curve/curve.h"
#include "harness/curve/published_limits.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// The spread of a run with a number that is not finite. It is larger than any difference of finite
/// numbers.
inline constexpr double kUnboundedSpread = 1e300;

struct CurveBounds {
  double factor = 3;             ///< allowed is the envelope times this,
  double relative_floor = 1e-6;  ///< but no less than this times the reference's value,
  double ceiling = 0.05;         ///< and of the global loss no more than this.
  double chaotic = 0.01;         ///< an envelope above this share of the loss shows nothing
  /// For a reference without perturbed runs: the largest relative difference. None: every number
  /// must be equal.
  std::optional<double> rtol;
};

/// What is allowed of a curve, which says its subject and dtypes: never more than `ceilings` say of
/// the subject, than 1e-4 in fp32 and fp64, and than 0.05 (seeds/001). Of a loss that is a sum over
/// tokens it is as many times more.
[[nodiscard]] CurveBounds curve_bounds(
    const Curve& actual, std::span<const std::pair<std::string_view, double>> ceilings);

/// One number of a run beside the reference's.
struct CurveDeviation {
  int step = 0;
  std::string number;  ///< "loss", "loss of dp rank 1", "grad_norm", "learning_rate"
  double reference = 0, actual = 0;
  double deviation = 0, allowed = 0;
  std::string rule;  ///< why so much is allowed, in words
};

struct CurveVerdict {
  Status status = Status::kVacuous;
  Strength strength = Strength::kNone;  ///< of one that conforms: exact if nothing was allowed
  std::string label;                    ///< label_of the run
  std::string reason;                   ///< one line
  int steps = 0;                        ///< compared
  std::optional<CurveDeviation> first;  ///< the first that is not allowed
  CurveDeviation largest;               ///< of the global loss, up to `first`
  double largest_share = 0;             ///< of any number: deviation / allowed
  std::vector<CurveLimit> published;    ///< limits that others print; see published_limits
  std::vector<double> allowed_losses;   ///< what is allowed of the global loss, by compared step
};

/// Global loss, loss of each dp rank, gradient norm and learning rate of every step. The learning
/// rate must be equal.
///
/// Vacuous: the reference is chaotic (its envelope is above `chaotic`), has no steps or has
/// something that is not a number. Diverges: a number is not within what is allowed, NaN is on one
/// side, a run has fewer or more steps, other ones, or not the loss of each dp rank, or its loss is
/// not the mean of its ranks' where the reference's is in every step. Settings are not looked at:
/// see refuse_different_settings.
[[nodiscard]] CurveVerdict judge_curve(const Curve& reference, const Curve& actual,
                                       const CurveBounds& bounds);

/// Why nothing can be judged against the curves of this reference; empty if it can.
[[nodiscard]] std::string chaos_of(const Curve& reference, const CurveBounds& bounds);

/// The largest differences of `runs` from `reference`, step by step.   Errors   UsageError if a run
/// has other steps.
[[nodiscard]] std::vector<CurveSpread> spreads_of(const Curve& reference,
                                                  const std::vector<Curve>& runs);

/// The verdict in a few lines: the largest deviation, or the first number that is wrong, with hex
/// floats.
[[nodiscard]] std::string render(const CurveVerdict& verdict);

/// One line for each setting in which two curves differ (harness/bundle/run_settings.h), and for
/// other initial weights or other batches, or where the reference alone says anything of them.
[[nodiscard]] std::vector<std::string> differing_settings(const Curve& reference,
                                                          const Curve& actual);
/// Errors   UsageError that names them, and each setting with both values.
void refuse_different_settings(const Curve& reference, const Curve& actual);

}  // namespace isoshard
