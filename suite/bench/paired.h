// SPDX-License-Identifier: Apache-2.0
/// Whether one configuration is faster than another, decided by many runs and never by one.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "suite/bench/bench.h"

namespace isoshard {

/// kFaster, kSlower: the whole interval lies on that side. kNotTold: 1 is inside it.
enum class PairedVerdict : std::uint8_t { kFaster, kSlower, kNotTold };
[[nodiscard]] std::string_view name_of(PairedVerdict verdict) noexcept;

/// The time of B in units of that of A.
struct RatioInterval {
  double ratio = 1, low = 1, high = 1;
  double confidence = 0.95;
  [[nodiscard]] PairedVerdict verdict() const noexcept;
};

inline constexpr int kFewestPairs = 3;

/// The mean ratio b / a of pairs, with its interval: of logarithms, by Student's t.
///
/// Requires   as many values of a as of b, all above 0; 0 < confidence < 1.
/// Errors     UsageError for fewer than kFewestPairs pairs.
[[nodiscard]] RatioInterval ratio_of_pairs(std::span<const double> a, std::span<const double> b,
                                           double confidence);

/// The same of values that were not measured in pairs (Welch).
/// Errors     UsageError for fewer than kFewestPairs values on a side.
[[nodiscard]] RatioInterval ratio_of_samples(std::span<const double> a, std::span<const double> b,
                                             double confidence);

struct PairedRuns {
  std::vector<double> a, b;  ///< seconds a token: a run's median step over its tokens
  GateResult gate_a, gate_b;
};

/// Runs A and B in pairs, one after the other; which comes first changes from pair to pair, so that
/// a machine that slows down favors none. Runs nothing if a gate is not passed.
/// `on_pair` is called after each pair.
/// Errors   as bench.
[[nodiscard]] PairedRuns run_pairs(const BenchPlan& a, const BenchPlan& b, int pairs,
                                   const BenchListener& listener,
                                   const std::function<void(int pair)>& on_pair);

/// A run's median step, for each of its tokens, in seconds.
[[nodiscard]] double seconds_per_token(const BenchRun& run, const Case& item);

}  // namespace isoshard
