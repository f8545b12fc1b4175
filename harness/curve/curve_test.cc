// SPDX-License-Identifier: Apache-2.0
// Curve files: what is written is read, and nothing else is.
#include "harness/curve/curve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "harness/curve/curve_judge.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

Curve small_curve() {
  Curve curve;
  curve.subject = "autotp";
  curve.title = "DeepSpeed AutoTP";
  curve.case_slug = "qwen2_tp2_dp2_steps2";
  curve.mesh = {{"dp", 2}, {"tp", 2}};
  curve.settings = R"({"dtype":"fp32","optimizer":{"kind":"sgd"}})";
  curve.fingerprint = {{"libtorch", "2.11.0"}};
  curve.steps = {{0, 10.8, {10.9, 10.7}, 2.5, 0.1}, {1, 0.1 + 0.2, {1.0 / 3, 0.2}, 1e-310, 0.1}};
  return curve;
}

/// What reading the text of `curve`, changed by `edit`, says.
template <class Edit>
std::string refusal(const Curve& curve, Edit edit) {
  json changed = json::parse(curve_text(curve));
  edit(changed);
  try {
    (void)parse_curve(changed.dump(), "loss_x.json");
  } catch (const FileError& error) {
    return error.what();
  }
  return "no error";
}

TEST(CurveFile, HoldsEveryBit) {
  Curve curve = small_curve();
  curve.perturbed_runs = 5;
  curve.spreads = {{1e-7, 2e-7, 0}, {3e-9, 0, 0.1}};

  const Curve read = parse_curve(curve_text(curve), "loss_autotp.json");

  EXPECT_EQ(curve_text(read), curve_text(curve));
  ASSERT_EQ(read.steps.size(), 2U);
  EXPECT_EQ(to_hex(read.steps[1].loss), to_hex(0.1 + 0.2));
  EXPECT_EQ(to_hex(read.steps[1].grad_norm), to_hex(1e-310));
  EXPECT_THAT(read.steps[0].rank_losses, ElementsAre(10.9, 10.7));
  EXPECT_EQ(read.spreads.at(1).grad_norm, 0.1);
  EXPECT_EQ(json::parse(read.settings), json::parse(curve.settings));
}

TEST(CurveFile, HoldsNanAndInfinities) {
  Curve curve = small_curve();
  curve.steps[1].loss = std::numeric_limits<double>::quiet_NaN();
  curve.steps[1].grad_norm = -std::numeric_limits<double>::infinity();

  const Curve read = parse_curve(curve_text(curve), "loss_autotp.json");

  EXPECT_TRUE(std::isnan(read.steps[1].loss));
  EXPECT_EQ(read.steps[1].grad_norm, -std::numeric_limits<double>::infinity());
  EXPECT_FALSE(is_finite(read.steps[1]));
  EXPECT_TRUE(is_finite(read.steps[0]));
}

TEST(CurveFile, RefusesStepsThatAreMissingOrTwice) {
  const Curve curve = small_curve();

  EXPECT_THAT(refusal(curve, [](json& j) { j["steps"][1]["step"] = 2; }),
              AllOf(HasSubstr("loss_x.json"), HasSubstr("steps[1] is step 2")));
  EXPECT_THAT(refusal(curve, [](json& j) { j["steps"].push_back(j["steps"][1]); }),
              HasSubstr("steps[2] is step 1"));
  EXPECT_THAT(refusal(curve, [](json& j) { j["steps"] = json::array(); }),
              HasSubstr("must have steps"));
}

TEST(CurveFile, OfAResumedRunBeginsWhereItWentOnAndIsComparedWithSuchARunOnly) {
  const Curve whole = small_curve();
  Curve rest = whole;
  rest.steps.erase(rest.steps.begin());

  EXPECT_EQ(parse_curve(curve_text(rest), "loss_x.json").steps.front().step, 1);
  EXPECT_NO_THROW(refuse_different_settings(rest, rest));
  EXPECT_THAT([&] { refuse_different_settings(whole, rest); },
              RefusesBy<UsageError>(RuleId::kCurvesBeginElsewhere, {{"first", 0}, {"other", 1}}));
}

TEST(CurveFile, RefusesADecimalThatIsNotItsHexFloat) {
  const Curve curve = small_curve();

  EXPECT_THAT(refusal(curve, [](json& j) { j["steps"][1]["loss"] = 0.3; }),
              AllOf(HasSubstr("steps[1].loss must equal"), HasSubstr("got 0.3")));
  EXPECT_THAT(refusal(curve, [](json& j) { j["steps"][1]["loss"] = nullptr; }),
              AllOf(HasSubstr("steps[1].loss must equal"), HasSubstr("got null")));
  EXPECT_THAT(refusal(curve, [](json& j) { j["steps"][0]["rank_losses_hex"][1] = "0x1.8"; }),
              HasSubstr("must be a hex float"));
  EXPECT_THAT(refusal(curve, [](json& j) { j["steps"][0].erase("loss_hex"); }),
              HasSubstr("has no \"loss_hex\""));
}

TEST(CurveFile, RefusesWhatIsNoCurve) {
  const Curve curve = small_curve();

  EXPECT_THAT(refusal(curve, [](json& j) { j["schema"] = 2; }), HasSubstr("got 2"));
  EXPECT_THAT(refusal(curve, [](json& j) { j["kind"] = "report"; }), HasSubstr("is not a curve"));
  EXPECT_THAT(refusal(curve, [](json& j) { j["perturbed_runs"] = 5; }),
              HasSubstr("lacks a spread, but there are 5"));
  EXPECT_THAT(refusal(curve, [](json& j) { j["steps"][1]["rank_losses"].erase(0); }),
              HasSubstr("must be lists of the same length"));
  EXPECT_THAT(refusal(curve, [](json& j) { j["mesh"]["tp"] = -2; }),
              HasSubstr("mesh.tp must be a whole number of at least 1, got -2"));
  EXPECT_THAT(refusal(curve, [](json& j) { j["mesh"]["dp"] = 5; }),
              HasSubstr("losses of the 5 dp ranks of its mesh, got 2"));
  EXPECT_THAT(refusal(curve, [](json& j) { j["settings"] = "sgd"; }),
              HasSubstr("settings must be an object"));
  EXPECT_THAT([] { (void)parse_curve("[]", "loss_x.json"); },
              RefusesBy<FileError>(RuleId::kFileForm));
  EXPECT_THROW((void)parse_curve("[1, 2", "loss_x.json"), FileError);
}

TEST(CurveFile, FolderIsReadWithTheReferenceFirst) {
  const TestFolder folder;
  for (const char* subject : {"ddp", "reference", "autotp"}) {
    Curve curve = small_curve();
    curve.subject = subject;
    write_curve(folder / curve_file_name(curve), curve);
  }
  write_file_atomically(folder / "report.json", "{}");

  const std::vector<Curve> curves = read_curves(folder.path());

  ASSERT_EQ(curves.size(), 3U);
  EXPECT_EQ(curves[0].subject, "reference");
  EXPECT_EQ(curves[1].subject, "autotp");
  EXPECT_EQ(curves[2].subject, "ddp");
}

TEST(CurveFile, FolderWithoutCurvesOrWithOneTwiceIsRefused) {
  const TestFolder folder;
  EXPECT_THAT([&] { (void)read_curves(folder.path()); }, RefusesBy<FileError>(RuleId::kNoCurves));
  EXPECT_THROW((void)read_curves(folder / "absent"), FileError);
  write_curve(folder / "loss_a.json", small_curve());
  write_curve(folder / "loss_b.json", small_curve());

  EXPECT_THAT([&] { (void)read_curves(folder.path()); },
              RefusesBy<FileError>(RuleId::kCurveTwice, {{"subject", small_curve().subject}}));
}

TEST(CurveFile, LabelNamesTheDegrees) {
  Curve curve = small_curve();
  EXPECT_EQ(label_of(curve), "DeepSpeed AutoTP (TP=2, DP=2)");
  curve.title = "";
  curve.mesh = {{"dp", 3}};
  EXPECT_EQ(label_of(curve), "autotp (TP=1, DP=3)");
}

}  // namespace
}  // namespace isoshard
