// SPDX-License-Identifier: Apache-2.0
/// The table of causes: names are stable and unique, and texts are filled by name.
#include "harness/ids/cause.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace isoshard {
namespace {

TEST(Causes, HaveUniqueNamesThatParseBack) {
  std::set<std::string> names;
  for (const CauseId id : all_ids<CauseId>()) {
    const std::string name(name_of(id));
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_EQ(find_id<CauseId>(name), id) << name;
    EXPECT_TRUE(std::ranges::all_of(name, [](char c) {
      return c == '_' || (c >= 'a' && c <= 'z');
    })) << name;
  }
  EXPECT_EQ(find_id<CauseId>("scael"), std::nullopt);
}

TEST(Causes, FillPlaceholdersByName) {
  const Cause cause = make_cause(CauseId::kScaleOfFormula, {{"formula", "tp"}, {"scale", 3.0}});
  EXPECT_EQ(cause.text, "scale 3 = tp");
  EXPECT_EQ(cause.number("scale"), 3);
  EXPECT_EQ(cause.number("formula"), std::nullopt);
  EXPECT_EQ(cause.number("other"), std::nullopt);
}

TEST(Causes, TakeWholeNumbersWhereRealOnesAreFormatted) {
  EXPECT_EQ(make_cause(CauseId::kScaleOfFormula, {{"formula", "tp"}, {"scale", 3}}).text,
            "scale 3 = tp");
}

TEST(Causes, ChooseBetweenOneAndSeveral) {
  const auto zeros = [](std::int64_t count, std::vector<std::int64_t> rows) {
    return make_cause(CauseId::kZeros, {{"zeros", count},
                                        {"rows", rows},
                                        NamedValue::words("first_rows", "4"),
                                        NamedValue::words("on_ranks", " on rank 1")})
        .text;
  };
  EXPECT_EQ(zeros(1, {4}),
            "1 element that should not be is 0, the others right (in row 4) on rank 1");
  EXPECT_EQ(zeros(2, {4, 5}),
            "2 elements that should not be are 0, the others right (in rows 4) on rank 1");
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

TEST(Causes, KeepWordsOfTheSentenceOutOfTheData) {
  EXPECT_FALSE(NamedValue::words("on_ranks", " on rank 1").is_data);
  EXPECT_TRUE(NamedValue("axis", "tp").is_data);
}

}  // namespace
}  // namespace isoshard
