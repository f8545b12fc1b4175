// SPDX-License-Identifier: Apache-2.0
/// Matchers of ids and their values, so that tests do not compare sentences.
///
///     EXPECT_THAT(verdict.findings[0], FindingIs(FindingId::kCopiesDiffer, {{"axes", axes}}));
///     EXPECT_THAT(verdict.rule, RuleIs(RuleId::kAllZero));
///     EXPECT_THAT(compare, RefusesBy<FileError>(RuleId::kSettingsMissing));
#pragma once
#include <gmock/gmock.h>

#include <string>
#include <utility>

#include "harness/ids/finding.h"
#include "harness/ids/rule.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// A finding with this id; the values may be of what it says or of its evidence, and others may be
/// there.
[[nodiscard]] inline testing::Matcher<const Finding&> FindingIs(FindingId id,
                                                                NamedValues values = {}) {
  return testing::ResultOf(
      "mismatch of finding",
      [expected = ExpectedFinding{id, std::move(values)}](const Finding& finding) {
        NamedValues all = finding.values;
        all.insert(all.end(), finding.measured.begin(), finding.measured.end());
        return mismatch(expected, finding.id, all);
      },
      testing::IsEmpty());
}

/// A rule with this id; other values may be there.
[[nodiscard]] inline testing::Matcher<const Rule&> RuleIs(RuleId id, NamedValues values = {}) {
  return testing::ResultOf(
      "mismatch of rule",
      [expected = ExpectedRule{id, std::move(values)}](const Rule& rule) {
        return mismatch(expected, rule);
      },
      testing::IsEmpty());
}

/// A call that throws an error of this class by this rule.
template <class Error>
[[nodiscard]] auto RefusesBy(RuleId id, NamedValues values = {}) {
  return testing::Throws<Error>(testing::ResultOf(
      "mismatch of rule",
      [expected = ExpectedRule{id, std::move(values)}](const Error& error) {
        const Rule* const rule = rule_of(error);
        return rule == nullptr ? std::string("no rule: ") + error.what()
                               : mismatch(expected, *rule);
      },
      testing::IsEmpty()));
}

}  // namespace isoshard
