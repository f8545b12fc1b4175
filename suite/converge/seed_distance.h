// SPDX-License-Identifier: Apache-2.0
/// Whether runs with other random seeds than their controls' end where controls do.
/// docs/internals/curves.md (Convergence) derives it.
#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "harness/curve/curve.h"

namespace isoshard {

/// The chance with which correct runs are rejected by one comparison over seeds.
inline constexpr double kSeedLevel = 1e-3;
/// Fewer controls say too little about how far apart correct runs end.
inline constexpr std::size_t kLeastSeeds = 3;

/// The quantile of Student's distribution that abs(t) exceeds with the chance `level`.
/// Requires   degrees >= 1, 0 < level < 1.   Source   Abramowitz and Stegun, 26.7.3 and 26.7.4.
[[nodiscard]] double student_quantile(int degrees, double level);

/// One number of the judged runs beside the controls.
struct SeedDistance {
  std::string number;       ///< "final loss", "mean final loss of all runs"
  std::size_t run = 0;      ///< which run, from 1; 0: the mean over all of them
  double control = 0;       ///< mean over the controls
  double value = 0;         ///< of the judged run, or the mean of all of them
  double deviation_of = 0;  ///< standard deviation over the controls
  double allowed = 0;       ///< of abs(value - control)
  [[nodiscard]] bool is_within() const noexcept;
};

/// Of final losses and of mean losses: the mean over the judged runs, and each judged run. The
/// spread is that of the controls alone, so runs that scatter do not widen what is allowed of them.
///
/// Errors   UsageError for fewer than kLeastSeeds controls, no judged run, or runs of another
/// number
///          of steps.
[[nodiscard]] std::vector<SeedDistance> seed_distances(std::span<const Curve> controls,
                                                       std::span<const Curve> runs);

}  // namespace isoshard
