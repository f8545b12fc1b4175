// SPDX-License-Identifier: Apache-2.0
/// How far apart two whole loss curves are, in a few numbers. docs/internals/curves.md
/// (Convergence) derives what is allowed of them.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "harness/curve/curve.h"
#include "harness/curve/curve_judge.h"

namespace isoshard {

/// What is measured of a run beside its control, over all steps. With d(t) = loss of the run -
/// loss of the control, and r(t) = norm of the run / norm of the control - 1:
enum class CurveNumber : std::uint8_t {
  kLoss,        ///< root of the mean of d squared: how far apart the curves are
  kLossOffset,  ///< mean of d: on which side of the control the run stays
  kFinalLoss,   ///< mean of d over the last tenth of the steps
  kNorm,        ///< root of the mean of r squared
  kNormOffset   ///< mean of r: a gradient of another scale
};
inline constexpr std::array kCurveNumbers = {CurveNumber::kLoss, CurveNumber::kLossOffset,
                                             CurveNumber::kFinalLoss, CurveNumber::kNorm,
                                             CurveNumber::kNormOffset};
/// "loss", "loss offset", "final loss", "gradient norm", "gradient norm offset"
[[nodiscard]] std::string_view name_of(CurveNumber number) noexcept;

/// The number over the first `steps` steps.   Units   of the loss, or relative (norms).
/// NaN    where either curve has one. Two norms of 0 are equal; one of them is an infinite r.
/// Requires   both curves have so many steps, at least one.
[[nodiscard]] double measure(CurveNumber number, const Curve& control, const Curve& run,
                             std::size_t steps);

/// How many steps at the end of a run count as its final ones: a tenth, at least one.
[[nodiscard]] std::size_t num_final_steps(std::size_t steps) noexcept;
/// The mean loss of the final steps.   Requires   at least one step.
[[nodiscard]] double final_loss(const Curve& curve);

/// How many steps can be judged one by one: those before the first in which bounds.factor times the
/// envelope of the control's spreads is above bounds.ceiling. Behind it right runs are further
/// apart than a step may ever be, and only whole curves say something.
[[nodiscard]] std::size_t num_judged_steps(const Curve& control, const CurveBounds& bounds);

/// One number of a judged run.
struct CurveDistance {
  CurveNumber number = CurveNumber::kLoss;
  double value = 0;    ///< signed where it is a mean
  double spread = 0;   ///< the largest of the control's perturbed runs
  double allowed = 0;  ///< of abs(value)
  int seen_from = -1;  ///< the first step by which it was above what is allowed; -1: never
  [[nodiscard]] bool is_within() const noexcept;
};

/// Every number of a run beside its control. Allowed is bounds.factor times the spread, at least
/// one ulp of fp32 (2^-23) of the control's mean loss (norms: of 1), and of losses at most
/// bounds.ceiling, or 0.05 where some steps cannot be judged one by one. All of this comes from the
/// control. Of the judged run only losses and norms are read.
///
/// Requires   all curves have the control's steps; the control has finite numbers.
/// Errors     UsageError if there is no perturbed run, or a run has another number of steps.
[[nodiscard]] std::vector<CurveDistance> distances_of(const Curve& control,
                                                      std::span<const Curve> perturbed,
                                                      const Curve& run, const CurveBounds& bounds);

/// The smallest shift of the loss in all of the last quarter of the steps that would be rejected of
/// a run which is else its control: what a verdict would have missed.
/// Requires   as distances_of, and the spreads of the control.
[[nodiscard]] double least_shift_seen(const Curve& control, std::span<const Curve> perturbed,
                                      const CurveBounds& bounds);

}  // namespace isoshard
