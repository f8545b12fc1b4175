// SPDX-License-Identifier: Apache-2.0
/// Compares a run with its golden and gives one of three answers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "harness/golden/golden.h"

namespace isoshard {

/// kMatch: every bit is equal. kDrift: the run's machine rounds unlike the golden's (another
/// arithmetic digest), and every number is within its recorded drift. kRegression: anything else.
enum class GoldenAnswer : std::uint8_t { kMatch, kDrift, kRegression };
[[nodiscard]] std::string_view name_of(GoldenAnswer answer) noexcept;  ///< match, drift, regression

/// One place where a run differs from its golden.
struct GoldenDifference {
  std::size_t index = 0;       ///< of the line
  std::string line;            ///< its name
  std::string what;            ///< "loss", "digest", "projections", "the line"
  std::string golden, actual;  ///< hex floats or digests; "none" for what is missing
  double difference = 0;       ///< NaN for what has none
  double drift = 0;            ///< recorded for it
};

struct GoldenComparison {
  GoldenAnswer answer = GoldenAnswer::kRegression;
  bool rounds_alike = false;      ///< the arithmetic digests are equal: every bit must be
  std::size_t lines = 0;          ///< compared, up to the first that is wrong
  std::size_t unequal_lines = 0;  ///< of them
  /// The first that is wrong; of a drift the first that differs.
  std::optional<GoldenDifference> first;
  double largest_share = 0;      ///< of what a number may drift; of a drift
  double largest_projected = 0;  ///< the same of projections
  /// Of the unequal lines with a digest, those that were judged by their numbers alone: the golden
  /// has no projections of them.
  std::size_t without_projections = 0;
};

/// Compares line by line, in order, up to the first that is wrong. Lines or numbers that only one
/// has are a regression; so are ranks that were copies and are none, a tensor that no longer equals
/// the one that it is a copy of, projections that are too far off, a number that is NaN or
/// infinite, even if the golden has the same, and zeros of another sign where machines round alike.
/// Requires   equal config, weights and inputs: see staleness.
[[nodiscard]] GoldenComparison compare_golden(const Golden& golden, const Golden& actual);

/// Why the golden belongs to another run than `actual`, with both values of each setting that
/// differs; empty if it belongs to this run.
[[nodiscard]] std::string staleness(const Golden& golden, const Golden& actual);

/// "cpu: golden \"A\", here \"B\"", one line each; for a regression only.
[[nodiscard]] std::string differing_fingerprints(const Golden& golden, const Golden& actual);

/// How many doubles lie between two numbers, and 1: 0 for equal bits, infinite if one is NaN or
/// they have different signs.
[[nodiscard]] double ulps_between(double a, double b) noexcept;

/// A few lines: the answer, the first difference with both hex floats, and for a regression
/// `look_further`, a command.
[[nodiscard]] std::string render(const Golden& golden, const Golden& actual,
                                 const GoldenComparison& comparison,
                                 const std::string& look_further);

}  // namespace isoshard
