// SPDX-License-Identifier: Apache-2.0
/// The table of causes: names are stable and unique, and texts are filled by name.
#include "harness/ids/cause.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "harness/ids/cause_notes.h"

namespace isoshard {
namespace {

TEST(Causes, HaveNamesOfSmallLetters) {
  for (const CauseId id : all_ids<CauseId>()) {
    const std::string name(name_of(id));
    EXPECT_TRUE(std::ranges::all_of(name, [](char c) {
      return c == '_' || (c >= 'a' && c <= 'z');
    })) << name;
  }
}

TEST(Causes, HaveNotesThatArePrintedAsSentences) {
  for (const CauseId id : all_ids<CauseId>()) {
    const auto& [of, meaning, needs, looks_like] = note_of(id);
    EXPECT_EQ(of, id) << name_of(id);
    EXPECT_TRUE(meaning.ends_with('.') && meaning.find(". ") == meaning.npos) << meaning;
    EXPECT_TRUE(meaning.front() >= 'A' && meaning.front() <= 'Z') << meaning;
    EXPECT_FALSE(needs.empty() || needs.ends_with('.')) << name_of(id);
    EXPECT_FALSE(looks_like.ends_with('.')) << name_of(id);
  }
}

TEST(Causes, AreNamedInOtherNotesByTheirNames) {
  for (const CauseId id : all_ids<CauseId>()) {
    std::string_view words = note_of(id).looks_like;
    for (auto at = words.find("(then `"); at != words.npos; at = words.find("(then `")) {
      words.remove_prefix(at + std::string_view("(then `").size());
      const std::string_view name = words.substr(0, words.find('`'));
      EXPECT_TRUE(find_id<CauseId>(name).has_value()) << name_of(id) << ": " << name;
    }
  }
}

TEST(Causes, HaveAClaimOfTheTableOfClaims) {
  for (const CauseId id : all_ids<CauseId>()) {
    const auto claim = claim_of(id);
    EXPECT_EQ(claim_notes()[static_cast<std::size_t>(claim)].claim, claim) << name_of(id);
  }
}

TEST(Causes, KeepTheirValuesByName) {
  const Cause cause = make_cause(CauseId::kScaleOfFormula, {{"formula", "tp"}, {"scale", 3.0}});
  EXPECT_EQ(cause.number("scale"), 3);
  EXPECT_EQ(cause.number("formula"), std::nullopt);
  EXPECT_EQ(cause.number("other"), std::nullopt);
}

TEST(Placeholders, AreFilledByName) {
  EXPECT_EQ(filled("{x:.4g} = {y}{?z}", {{"y", "tp"}, {"x", 3.0}}, "name"), "3 = tp");
}

TEST(Placeholders, TakeWholeNumbersWhereRealOnesAreFormatted) {
  EXPECT_EQ(filled("scale {x:.4g}", {{"x", 3}}, "name"), "scale 3");
}

TEST(Placeholders, ChooseBetweenOneAndSeveral) {
  const auto rows = [](std::int64_t count, std::vector<std::int64_t> rows) {
    return filled("{n} element{n:s} {n:is} 0 in row{rows:s} {rows}", {{"n", count}, {"rows", rows}},
                  "name");
  };
  EXPECT_EQ(rows(1, {4}), "1 element is 0 in row 4");
  EXPECT_EQ(rows(2, {4, 5}), "2 elements are 0 in rows 4, 5");
}

TEST(Placeholders, JoinSeveralValues) {
  const NamedValues axes = {{"axes", std::vector{"dp", "tp"}}};
  EXPECT_EQ(filled("{axes} and {axes:and}", axes, "name"), "dp, tp and dp and tp");
}

TEST(Placeholders, ThatAreNotOptionalNeedAValue) {
  EXPECT_EQ(filled("scale{?x}", {}, "scale"), "scale");
  EXPECT_THROW((void)filled("scale{x}", {}, "scale"), std::logic_error);
  EXPECT_THROW((void)make_cause(CauseId::kMeanOfShards, {{"shards", 3}}), std::logic_error);
}

TEST(Placeholders, WithoutAnEndAreWords) {
  EXPECT_EQ(filled("scale {x", {{"x", 1}}, "scale"), "scale {x");
  EXPECT_EQ(filled("scale } {x}", {{"x", 1}}, "scale"), "scale } 1");
}

TEST(Placeholders, StayInTheTextsOfPrograms) {
  const auto is_kept = [] {
    keep_gaps();
    return filled("scale{x}{?y}", {}, "scale") == "scale{x}";
  };
  EXPECT_EXIT(std::exit(is_kept() ? 0 : 1), testing::ExitedWithCode(0), "");
}

TEST(Causes, AreComparedByIdAndListedValues) {
  const Cause cause = make_cause(
      CauseId::kRankLocalPartial,
      {{"axis", "tp"}, NamedValue::words("holders", "tp"), {"copies", 3}, {"share", 0.25}});
  const auto is_expected = [&](CauseId id, NamedValues values, double relative = 0.005) {
    return mismatch({id, std::move(values)}, cause, relative).empty();
  };
  EXPECT_TRUE(is_expected(CauseId::kRankLocalPartial, {}));
  EXPECT_TRUE(is_expected(CauseId::kRankLocalPartial, {{"axis", "tp"}, {"copies", 3}}));
  EXPECT_TRUE(is_expected(CauseId::kRankLocalPartial, {{"share", 0.26}}, 0.06));
  EXPECT_FALSE(is_expected(CauseId::kRankLocalPartial, {{"share", 0.26}}));
  EXPECT_FALSE(is_expected(CauseId::kRankLocalPartial, {{"axis", "dp"}}));
  EXPECT_FALSE(is_expected(CauseId::kRankLocalPartial, {{"copies", std::vector{3, 3}}}));
  EXPECT_FALSE(is_expected(CauseId::kRankLocalPartial, {{"rank", 0}}));
  EXPECT_FALSE(is_expected(CauseId::kRankLocal, {}));
  EXPECT_FALSE(is_expected(CauseId::kNone, {}));
  EXPECT_TRUE(is_expected(CauseId::kNone, {{"axis", "tp"}}));
  EXPECT_FALSE(is_expected(CauseId::kNone, {{"axis", "dp"}}));
  EXPECT_FALSE(mismatch({CauseId::kNone, {{"axis", "tp"}}}, Cause()).empty());
}

TEST(Causes, KeepTheFirst64OfALongListAndTheirNumber) {
  const auto cause = [](std::size_t count) {
    return make_cause(CauseId::kFactorPerRank, {{"factors", std::vector<double>(count, 2)}});
  };
  EXPECT_EQ(numbers_of(cause(64).values, "factors").size(), 64U);
  EXPECT_EQ(cause(64).number("num_factors"), std::nullopt);
  EXPECT_EQ(numbers_of(cause(65).values, "factors").size(), 64U);
  EXPECT_EQ(cause(65).number("num_factors"), 65);
}

TEST(Causes, KeepWordsOfTheSentenceOutOfTheData) {
  EXPECT_FALSE(NamedValue::words("on_ranks", " on rank 1").is_data);
  EXPECT_TRUE(NamedValue("axis", "tp").is_data);
}

}  // namespace
}  // namespace isoshard
