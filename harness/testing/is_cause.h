// SPDX-License-Identifier: Apache-2.0
/// GoogleMock matchers of causes: by id and values, never by the sentence that is made of them.
#pragma once
#include <gmock/gmock.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/ids/cause.h"

namespace isoshard {

/// Prints "rank_local_partial (axis tp, copies 3)", or "no cause".
inline void PrintTo(const Cause& cause, std::ostream* out) {
  ExpectedCause seen{cause.id, cause.values};
  std::erase_if(seen.values, [](const NamedValue& value) { return !value.is_data; });
  *out << (cause.empty() ? "no cause" : in_words(seen));
}

namespace causes_testing {

class CauseMatcher {
 public:
  using is_gtest_matcher = void;

  explicit CauseMatcher(ExpectedCause expected) : expected_(std::move(expected)) {}

  bool MatchAndExplain(const Cause& cause, std::ostream* why) const {
    // as near as numbers of four digits are
    const std::string difference = mismatch(expected_, cause, /*relative=*/5e-4);
    if (why != nullptr) *why << difference;
    return difference.empty();
  }
  void DescribeTo(std::ostream* out) const {
    *out << "is " << (expected_.id == CauseId::kNone ? "no cause" : in_words(expected_));
  }
  void DescribeNegationTo(std::ostream* out) const {
    *out << "not: ";
    DescribeTo(out);
  }

 private:
  ExpectedCause expected_;
};

}  // namespace causes_testing

/// Matches a cause with this id and these values, numbers among them to within 0.05 %. It may have
/// more values.
///
///     EXPECT_THAT(finding.cause, IsCause(CauseId::kRankLocal, {{"axis", "dp"}, {"copies", 2}}));
[[nodiscard]] inline testing::Matcher<const Cause&> IsCause(CauseId id, NamedValues values = {}) {
  return causes_testing::CauseMatcher({id, std::move(values)});
}

/// Matches where no pattern fits.
[[nodiscard]] inline testing::Matcher<const Cause&> IsNoCause() {
  return IsCause(CauseId::kNone);
}

/// Matches where no pattern fits a number: its offset and its factor are alternatives.
[[nodiscard]] inline testing::Matcher<const Cause&> IsOnlyOff() {
  return testing::Field("id", &Cause::id,
                        testing::AnyOf(CauseId::kNumberOff, CauseId::kNumbersOff));
}

/// Matches a cause without a value of that name: without "ranks" all ranks are wrong.
[[nodiscard]] inline testing::Matcher<const Cause&> HasNoValue(std::string_view name) {
  return testing::Field("values", &Cause::values,
                        testing::Not(testing::Contains(testing::Field(
                            "name", &NamedValue::name, testing::Eq(std::string(name))))));
}

}  // namespace isoshard
