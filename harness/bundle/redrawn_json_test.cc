// SPDX-License-Identifier: Apache-2.0
/// redrawn.json of a reference's bundle: what is written comes back bit by bit, and what no program
/// of ours writes is refused by name.
#include "harness/bundle/redrawn_json.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "core/base/error.h"
#include "harness/bundle/bundle.h"
#include "harness/judge/bundle_rules.h"
#include "harness/testing/bundle_edit.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using namespace synthetic;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

const RecordKey kW{0, RecordKind::kGrad, "w", 0};

Body step(double factor) {
  return [=](Sink& sink, int) {
    sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})),
                   at::full({1}, 5.5, at::kDouble));
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({8})), values({8}, 3) * factor);
    sink.begin_step(1);
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({8})), values({8}, 4) * factor);
  };
}

/// With three redrawn runs, of which the second moves nothing.
Reference with_redrawn_runs() {
  Reference result = reference(step(1));
  for (const double factor : {1 + 1e-3, 1.0, 1 - 3e-3})
    result.add_redrawn(
        run(MeshShape(), &result, step(factor), Keep::kNothing, {}, RunPurpose::kResponse));
  return result;
}

TEST(RedrawnRuns, ComeBackBitByBit) {
  const TestFolder folder;
  const Reference r = with_redrawn_runs();

  write_bundle(folder.path() / "b", r);
  const Bundle got = read_bundle(folder.path() / "b");

  ASSERT_EQ(got.redrawn.runs, 3);
  EXPECT_EQ(got.redrawn.sums, r.redrawn().sums);
  ASSERT_TRUE(got.redrawn.sums.contains(kW));
  ASSERT_EQ(got.redrawn.sums.at(kW).size(), 3U);
  EXPECT_GT(got.redrawn.sums.at(kW)[0].sum_sq_diff, 0);
  EXPECT_EQ(got.redrawn.sums.at(kW)[1].sum_sq_diff, 0);
}

TEST(RedrawnRuns, OfAReferenceWithoutAnyHaveNoFile) {
  const TestFolder folder;

  write_bundle(folder.path() / "b", reference(step(1)));

  EXPECT_FALSE(std::filesystem::exists(folder.path() / "b" / detail::kRedrawnFile));
  EXPECT_EQ(read_bundle(folder.path() / "b").redrawn.runs, 0);
}

TEST(RedrawnRuns, WithSumsThatNoDifferencesHaveAreRefused) {
  const Reference right = with_redrawn_runs();
  EXPECT_NO_THROW(require_fitting_responses(right, false, Dtype::kFloat32, "b"));

  for (double RedrawnSums::*const sum : {&RedrawnSums::dot_diff, &RedrawnSums::sum_diff}) {
    Reference wrong = with_redrawn_runs();
    Redrawn redrawn = wrong.redrawn();
    redrawn.sums.at(kW)[0].*sum = 1e3;  // no differences of that norm add up to so much
    wrong.set_redrawn(std::move(redrawn));

    EXPECT_THAT([&] { require_fitting_responses(wrong, false, Dtype::kFloat32, "b"); },
                RefusesBy<FileError>(RuleId::kRedrawnDoesNotFit));
  }
}

/// An edit of redrawn.json, and what the error says.
struct Malformed {
  std::string name;
  std::function<void(json&)> edit;
  std::string words;
};
std::ostream& operator<<(std::ostream& out, const Malformed& malformed) {
  return out << malformed.name;
}

class MalformedRedrawnRuns : public testing::TestWithParam<Malformed> {};

TEST_P(MalformedRedrawnRuns, AreRefusedWithTheFileAndTheCause) {
  json whole = detail::to_json(with_redrawn_runs().redrawn());
  ASSERT_EQ(detail::redrawn_of(whole, "b/redrawn.json").runs, 3);

  GetParam().edit(whole);

  EXPECT_THAT(
      [&] { (void)detail::redrawn_of(whole, "b/redrawn.json"); },
      ThrowsMessage<FileError>(AllOf(StartsWith("b/redrawn.json: "), HasSubstr(GetParam().words))));
}

/// The entry of "w" in step 0, and its draws.
json& entry_of_w(json& whole) {
  for (json& entry : whole.at("redrawn")) {
    if (entry.at("name") == "w" && entry.at("step") == 0) return entry;
  }
  throw std::logic_error("w has no entry");
}
json& draws_of_w(json& whole) {
  return entry_of_w(whole).at("draws");
}

Malformed number(std::string name, std::string value, int place = 1) {
  return {std::move(name), [=](json& whole) { draws_of_w(whole)[0][place] = value; }, "finite"};
}

INSTANTIATE_TEST_SUITE_P(
    Each, MalformedRedrawnRuns,
    testing::Values(
        number("Nan", "nan"), number("Infinity", "inf", 2), number("Overflow", "0x1p+2000", 3),
        number("Decimal", "0.5"), number("Empty", ""),
        Malformed{"NotAString", [](json& whole) { draws_of_w(whole)[0][1] = 0.5; }, "hex floats"},
        Malformed{"NegativeSquares", [](json& whole) { draws_of_w(whole)[0][1] = "-0x1p-10"; },
                  "must not be negative"},
        Malformed{"SumsWithoutDifferences",
                  [](json& whole) { draws_of_w(whole)[1][3] = "0x1p-10"; }, "no sums of them"},
        Malformed{"OutOfOrder",
                  [](json& whole) { std::swap(draws_of_w(whole)[0], draws_of_w(whole)[2]); },
                  "in the order of their runs"},
        Malformed{"RunTwice", [](json& whole) { draws_of_w(whole)[1][0] = 0; },
                  "in the order of their runs"},
        Malformed{"NegativeRun", [](json& whole) { draws_of_w(whole)[0][0] = -1; }, "got -1"},
        Malformed{"BeyondRuns", [](json& whole) { draws_of_w(whole)[2][0] = 3; }, "below 3, got 3"},
        Malformed{"RunIsNoNumber", [](json& whole) { draws_of_w(whole)[0][0] = 0.5; },
                  "the number of its run"},
        Malformed{"TooShort", [](json& whole) { draws_of_w(whole)[0].erase(3); },
                  "three hex floats"},
        Malformed{"RecordTwice",
                  [](json& whole) { whole.at("redrawn").push_back(json(entry_of_w(whole))); },
                  "is listed twice"},
        Malformed{"NoDraws", [](json& whole) { entry_of_w(whole).erase("draws"); }, "draws"},
        Malformed{"NoRuns", [](json& whole) { whole["runs"] = 0; }, "must be 1 to"},
        Malformed{"TooManyRuns", [](json& whole) { whole["runs"] = 1 << 20; }, "must be 1 to"},
        Malformed{"OtherSchema", [](json& whole) { whole["schema"] = 2; }, "the schema must be 1"}),
    [](const auto& test) { return test.param.name; });

TEST(RedrawnRuns, OfTensorsThatNobodyRecordedAreRefused) {
  const TestFolder folder;
  const auto bundle = folder.path() / "b";
  write_bundle(bundle, with_redrawn_runs());
  const auto refused_with = [&](const char* field, const json& value, const char* words) {
    bundle_edit::edit_json(bundle / detail::kRedrawnFile,
                           [&](json& whole) { entry_of_w(whole)[field] = value; });
    bundle_edit::seal(bundle);
    EXPECT_THAT([&] { (void)read_bundle(bundle); },
                ThrowsMessage<FileError>(AllOf(HasSubstr(detail::kRedrawnFile), HasSubstr(words))));
  };

  refused_with("step", 7, "no rank recorded gradient of w (step 7)");
}

}  // namespace
}  // namespace isoshard
