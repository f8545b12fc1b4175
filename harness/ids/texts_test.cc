// SPDX-License-Identifier: Apache-2.0
/// The one place that pins words: every text of the tables is as the golden file says. After a text
/// was changed on purpose: ninja -C build ids_texts && build/bin/ids_texts > FILE.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "harness/ids/finding.h"
#include "harness/ids/rendered_texts.h"
#include "harness/ids/rule.h"

namespace isoshard {
namespace {

TEST(Texts, AreThoseOfTheGoldenFile) {
  std::ifstream file(ISOSHARD_TEXTS_GOLDEN);
  const std::string golden{std::istreambuf_iterator<char>(file), {}};
  std::istringstream wanted{golden}, got{rendered_texts()};
  for (std::string a, b; std::getline(wanted, a) && std::getline(got, b);) ASSERT_EQ(b, a);
  EXPECT_EQ(rendered_texts().size(), golden.size());
}

template <TabledId Id>
void expect_unique_names() {
  std::set<std::string> names;
  for (const Id id : all_ids<Id>()) {
    EXPECT_TRUE(names.emplace(name_of(id)).second) << name_of(id);
    EXPECT_EQ(find_id<Id>(name_of(id)), id);
  }
  EXPECT_EQ(find_id<Id>("no_such_name"), std::nullopt);
}

TEST(Texts, FindingAndRuleNamesAreUnique) {
  expect_unique_names<FindingId>();
  expect_unique_names<RuleId>();
}

TEST(Texts, OfRulesSayWhyTheRuleIsThere) {
  for (const RuleId id : all_ids<RuleId>()) EXPECT_NE(row_of(id).more, "") << name_of(id);
}

TEST(Texts, MayHaveBracesOfTheirOwn) {
  EXPECT_EQ(filled("{{\"a\": {{{n}}}}}", {{"n", 3}}), "{\"a\": {3}}");
}

TEST(Rules, AreCarriedByErrorsOfAnyClass) {
  try {
    refuse("run/manifest.json", RuleId::kMasksMissing, {{"dropout", "p is 0.1"}});
    FAIL();
  } catch (const std::exception& error) {
    ASSERT_NE(dynamic_cast<const FileError*>(&error), nullptr);
    ASSERT_NE(rule_of(error), nullptr);
    EXPECT_EQ(
        mismatch(ExpectedRule{RuleId::kMasksMissing, {{"dropout", "p is 0.1"}}}, *rule_of(error)),
        "");
    EXPECT_TRUE(std::string(error.what()).starts_with("run/manifest.json: "));
    EXPECT_EQ(message_of(error), std::string(error.what()) + " [masks_missing]");
  }
  EXPECT_EQ(rule_of(UsageError("wrong flag")), nullptr);
  EXPECT_EQ(message_of(UsageError("wrong flag")), "wrong flag");
}

}  // namespace
}  // namespace isoshard
