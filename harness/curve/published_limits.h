// SPDX-License-Identifier: Apache-2.0
/// The limits that a published verification of training scripts prints for curves of 100 steps
/// (docs/internals/seeds.md, section 2). They are shown beside every verdict and held at the
/// learning rates that they were published for.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "harness/curve/curve.h"

namespace isoshard {

/// Limits of absolute differences of the global loss over a run.
struct SubjectCurveLimits {
  std::string_view subject;
  double largest = 0, mean = 0;
};

inline constexpr double kInitialLossLimit = 1e-3;  ///< of the first step, for every subject
inline constexpr double kPublishedLearningRate = 1e-5;

struct CurveLimit {
  std::string what;  ///< "initial loss", "largest difference", "mean difference"
  double limit = 0, measured = 0;
  bool holds = false;  ///< measured < limit; a NaN does not hold
};

/// Of a subject that `limits` names: all three over the steps that both have. None for other
/// subjects, for runs that do not begin at step 0, and for losses that are sums over tokens.
[[nodiscard]] std::vector<CurveLimit> published_limits(const Curve& reference, const Curve& actual,
                                                       std::span<const SubjectCurveLimits> limits);

/// Whether the limits were published for runs like this: no learning rate above the published one.
/// At larger ones roundings grow faster than limits say.
[[nodiscard]] bool are_held(const Curve& actual) noexcept;

/// "published limits: initial loss 0.00046 (below 0.001), largest difference ...", in one line.
[[nodiscard]] std::string limits_in_words(std::span<const CurveLimit> limits, bool held);

}  // namespace isoshard
