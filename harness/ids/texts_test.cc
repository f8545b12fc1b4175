// SPDX-License-Identifier: Apache-2.0
/// The one place that pins words: every text of the tables is as the golden file says. After a text
/// was changed on purpose: ninja -C build ids_texts && build/bin/ids_texts > FILE.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "harness/ids/cause.h"
#include "harness/ids/finding.h"
#include "harness/ids/phrase.h"
#include "harness/ids/rendered_texts.h"
#include "harness/ids/rule.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(Texts, AreThoseOfTheGoldenFile) {
  std::ifstream file(ISOSHARD_TEXTS_GOLDEN);
  const std::string golden{std::istreambuf_iterator<char>(file), {}};
  std::istringstream wanted{golden}, got{rendered_texts()};
  for (std::string a, b; std::getline(wanted, a) && std::getline(got, b);) ASSERT_EQ(b, a);
  EXPECT_EQ(rendered_texts().size(), golden.size());
}

TEST(Texts, PagesOfCausesAndRulesAreThoseOfTheTables) {
  for (const std::string kind : {"cause", "rule"}) {
    std::ifstream file(std::string(ISOSHARD_DOCS) + "/" + kind + "s.md");
    const std::string page{std::istreambuf_iterator<char>(file), {}};
    EXPECT_EQ(rendered_page(kind), page) << "build/bin/ids_texts " << kind << " writes it again";
  }
}

template <TabledId Id>
void expect_unique_names(std::set<std::string>& names) {
  for (const Id id : all_ids<Id>()) {
    EXPECT_TRUE(names.emplace(name_of(id)).second) << kind_of(id) << " " << name_of(id);
    EXPECT_EQ(find_id<Id>(name_of(id)), id);
  }
  EXPECT_EQ(find_id<Id>("no_such_name"), std::nullopt);
}

TEST(Texts, OfFindingsCausesAndRulesHaveNamesOfTheirOwn) {
  std::set<std::string> names;
  expect_unique_names<FindingId>(names);
  expect_unique_names<CauseId>(names);
  expect_unique_names<RuleId>(names);
  std::set<std::string> phrases;
  expect_unique_names<PhraseId>(phrases);
}

NamedValues without(NamedValues values, std::string_view name) {
  std::erase_if(values, [&](const NamedValue& value) { return value.name == name; });
  return values;
}

TEST(Texts, NeedAValueForEachPlaceholderThatIsNotOptional) {
  int optional = 0;
  for (const NamedText& one : all_texts()) {
    const NamedValues all = examples_of(one.text);
    NamedValues required = all;
    for (const Placeholder& place : placeholders_in(one.text)) {
      optional += place.is_optional ? 1 : 0;
      if (place.is_optional) {
        required = without(required, place.name);
        continue;
      }
      EXPECT_THAT(
          [&] { (void)filled(one.text, without(all, place.name), one.name); },
          ThrowsMessage<std::logic_error>(AllOf(HasSubstr(std::string(one.name)),
                                                HasSubstr(fmt::format("{{{}}}", place.name)))))
          << one.name;
    }
    EXPECT_NO_THROW((void)filled(one.text, required, one.name)) << one.name;
  }
  EXPECT_GT(optional, 40);
}

TEST(Texts, OfRulesSayWhyTheRuleIsThere) {
  for (const RuleId id : all_ids<RuleId>()) EXPECT_NE(row_of(id).more, "") << name_of(id);
}

TEST(Texts, MayHaveBracesOfTheirOwn) {
  constexpr std::string_view kText = "{{\"a\": {{{n}}}}}";
  EXPECT_EQ(filled(kText, {{"n", 3}}, "x"), "{\"a\": {3}}");
  EXPECT_EQ(with_names(kText), "{\"a\": {{n}}}");
}

TEST(Texts, AreCheckedForPairedBraces) {
  EXPECT_TRUE(has_paired_braces("{{x}} {?a} {b:.3g}"));
  for (const char* const wrong : {"{a", "a}", "{a {b}", "{{a}", "{a}}"})
    EXPECT_FALSE(has_paired_braces(wrong)) << wrong;
}

TEST(Texts, AreShownWithNamesForWhoLooksThemUp) {
  EXPECT_EQ(with_names("{n} step{n:s} {n:is} at {x:.4g}{?on_ranks}"),
            "{n} steps are at {x}[{on_ranks}]");
}

TEST(Rules, AreCarriedByErrorsOfAnyClass) {
  try {
    refuse("run/manifest.json", RuleId::kMasksMissing, {{"dropout", "attn_pdrop"}, {"p", 0.1}});
    FAIL();
  } catch (const std::exception& error) {
    ASSERT_NE(dynamic_cast<const FileError*>(&error), nullptr);
    ASSERT_NE(rule_of(error), nullptr);
    EXPECT_EQ(mismatch(ExpectedRule{RuleId::kMasksMissing, {{"dropout", "attn_pdrop"}, {"p", 0.1}}},
                       *rule_of(error)),
              "");
    EXPECT_TRUE(std::string(error.what()).starts_with("run/manifest.json: "));
    EXPECT_EQ(message_of(error), std::string(error.what()) + " [masks_missing]");
  }
  EXPECT_EQ(rule_of(UsageError("wrong flag")), nullptr);
  EXPECT_EQ(message_of(UsageError("wrong flag")), "wrong flag");
}

}  // namespace
}  // namespace isoshard
