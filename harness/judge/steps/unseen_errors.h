// SPDX-License-Identifier: Apache-2.0
/// Steps of the optimizer, and summands, of which a verdict would have missed an error.
#pragma once
#include <map>
#include <string>
#include <utility>

#include "harness/trace/record.h"
#include "harness/verdict/verdict.h"

namespace isoshard::detail {

/// Counts what passes unseen beside the errors of scale that Verdict::would_miss begins with.
///
/// Of steps: parameters of which neither the values nor the masters after some step would have
/// shown that the step was left out. Of sums over ranks: summands are judged by their sum alone.
class UnseenErrors {
 public:
  /// Of a comparison. `hides_step` as SetTolerance::hides_step; nothing but parameters and masters
  /// after a step counts. `is_sum`: ranks hold summands of it.
  void add(const RecordKey& key, bool hides_step, bool is_sum);

  /// Words for Verdict::would_miss, with those that masks left out; empty if every step is seen.
  [[nodiscard]] std::string words(const JudgedShare& judged) const;

 private:
  std::map<std::pair<int, std::string>, bool> is_seen_;  ///< by step and parameter
  int sums_ = 0;
};

}  // namespace isoshard::detail
