// SPDX-License-Identifier: Apache-2.0
/// A study judges each random bug once, by all checks, and what it counts is what they said.
#include "suite/study/study.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "core/base/error.h"
#include "fixtures/cases/presets.h"
#include "suite/study/study_tables.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kCurveSteps = 3;

Case study_case(std::string_view subject, const Degrees& degrees) {
  for (const Case& item : study_cases())
    if (item.subject == subject && item.degrees == degrees) return item;
  throw UsageError("no such case");
}

bool said(const StudyRow& row, WeakCheck check) {
  return row.weak[static_cast<std::size_t>(check)];
}

std::vector<StudyRow> rows_of(const StudyPlan& plan, const std::vector<StudyRow>& known = {}) {
  std::vector<StudyRow> rows;
  run_study(plan, known, [&](const StudyRow& row) { rows.push_back(row); });
  return rows;
}

// A study that is broken off and goes on says the same as one that is not.
TEST(FaultStudy, FindsWhatShowsAndGoesOnWhereItWasBrokenOff) {
  StudyPlan plan{.seed = 4, .count = 3, .curve_steps = kCurveSteps};
  plan.cases = {study_case("ddp", {.dp = 3})};
  ASSERT_EQ(plan.cases.front().world_size(), 3);

  const std::vector<StudyRow> rows = rows_of(plan);
  const std::vector<StudyRow> later = rows_of(plan, {rows[0], rows[1], rows[2]});

  ASSERT_EQ(rows.size(), 4U) << "one clean run and three bugs";
  EXPECT_FALSE(rows[0].exact || rows[0].within || said(rows[0], WeakCheck::kCurve));
  for (std::size_t i = 1; i < rows.size(); ++i) {
    EXPECT_TRUE(rows[i].fired) << rows[i].composition;
    EXPECT_EQ(rows[i].exact, rows[i].is_visible) << rows[i].composition;
  }
  EXPECT_EQ(failures_of(rows).false_alarms + failures_of(rows).missed, 0);
  ASSERT_EQ(later.size(), 1U);
  EXPECT_EQ(to_line(later[0]), to_line(rows[3]));
}

// The null set of the search for causes, in small. `isoshard faults study --noise-only` runs more.
TEST(FaultStudy, NoiseHasNoCause) {
  StudyPlan plan{.seed = 1, .count = 30, .is_noise = true};
  plan.cases = {study_case("ddp", {.dp = 3}), study_case("autotp", {.dp = 2, .tp = 2})};
  ASSERT_EQ(plan.cases.front().world_size(), 3);
  ASSERT_EQ(plan.cases.back().world_size(), 4);

  const std::vector<StudyRow> rows = rows_of(plan);

  ASSERT_EQ(rows.size(), 32U) << "two clean runs and the noise";
  EXPECT_GE(std::ranges::count(rows, true, &StudyRow::within), 20) << "too few alarms to show much";
  for (const StudyRow& row : rows) {
    EXPECT_EQ(row.bug.change == FaultChange::kNoise, row.index >= 0) << row.composition;
    EXPECT_TRUE(row.blame.cause.empty() || tells_only_the_place(row.blame.cause.id))
        << row.composition << ": " << row.diagnosis;
  }
  EXPECT_FALSE(failures_of(rows).any());
}

// The loss of the step is right where backward is wrong, and one element of many is in no norm.
TEST(FaultStudy, EachCheckSeesWhatItLooksAt) {
  const Case item = study_case("autotp", {.dp = 2, .tp = 2});
  ASSERT_EQ(item.world_size(), 4);
  const Injection backward{.point = FaultPoint::kBackward,
                           .name = "model.layers.1.mlp",
                           .change = FaultChange::kScale,
                           .magnitude = 1,
                           .ranks = FaultRanks{Axis::kTp, 1}};
  Injection element{.point = FaultPoint::kForward,
                    .name = "model.layers.0.mlp",
                    .change = FaultChange::kShift,
                    .extent = FaultExtent::kElement,
                    .magnitude = 1e-6,
                    .position = 0.9};

  const StudyRow wrong_backward = judge_composition(item, backward, kCurveSteps),
                 wrong_element = judge_composition(item, element, kCurveSteps);

  EXPECT_TRUE(wrong_backward.fired && wrong_backward.exact && wrong_backward.within);
  EXPECT_EQ(wrong_backward.exact_place, true);
  EXPECT_EQ(wrong_backward.within_place, true);
  EXPECT_NE(wrong_backward.grade(), CauseGrade::kNotGraded) << wrong_backward.diagnosis;
  EXPECT_TRUE(said(wrong_backward, WeakCheck::kGradients));
  EXPECT_FALSE(said(wrong_backward, WeakCheck::kForward));
  EXPECT_FALSE(said(wrong_backward, WeakCheck::kFirstLoss));
  EXPECT_FALSE(said(wrong_backward, WeakCheck::kFirstElements));
  EXPECT_TRUE(wrong_element.fired && wrong_element.exact);
  EXPECT_EQ(wrong_element.exact_place, true);
  EXPECT_FALSE(wrong_element.within) << "as small as a rounding";
  EXPECT_EQ(wrong_element.grade(), CauseGrade::kNotGraded);
  for (const WeakCheck check : kWeakChecks) EXPECT_FALSE(said(wrong_element, check));
}

at::Tensor numbers() {
  return at::arange(1, 41, at::kFloat).reshape({4, 10});
}

std::int64_t num_changed(const Injection& c) {
  return changed(numbers(), c).ne(numbers()).sum().item<std::int64_t>();
}

TEST(Compositions, ChangeWhatTheySayAndNothingElse) {
  for (const FaultChange change : {FaultChange::kScale, FaultChange::kShift, FaultChange::kZero}) {
    EXPECT_EQ(num_changed({.change = change, .magnitude = 0.01}), 40) << name_of(change);
    EXPECT_EQ(num_changed({.change = change, .extent = FaultExtent::kPart, .magnitude = 0.01}), 10);
    EXPECT_EQ(
        num_changed(
            {.change = change, .extent = FaultExtent::kElement, .magnitude = 0.01, .position = 1}),
        1);
  }
  EXPECT_EQ(num_changed({.change = FaultChange::kRound}), 0) << "small integers are bf16";
  const at::Tensor scaled = changed(numbers(), {.change = FaultChange::kScale, .magnitude = 1});
  EXPECT_TRUE(scaled.equal(2 * numbers()));
  const at::Tensor rolled = changed(numbers(), {.change = FaultChange::kRoll});
  EXPECT_TRUE(rolled.flatten().equal(numbers().flatten().roll(1)));
}

TEST(Compositions, AreDrawnAlikeAndOfAllKinds) {
  const StudyTags tags{
      {"m"}, {"m"}, {"w"}, {{CollectiveOp::kAllReduce, Purpose::kGradReduce, Axis::kDp}}};
  const Case item = study_case("autotp", {.dp = 2, .tp = 2});
  std::set<std::string> words;
  std::set<FaultPoint> points;
  std::set<FaultChange> changes;
  for (int i = 0; i < 300; ++i) {
    Draws draws(5, fmt::format("{}", i)), again(5, fmt::format("{}", i));
    const Injection c = draw_composition(draws, item, tags);
    EXPECT_EQ(study_words(c), study_words(draw_composition(again, item, tags)));
    EXPECT_FALSE(c.change == FaultChange::kSkip && c.ranks.has_value())
        << "ranks that skip alone hang the others";
    EXPECT_EQ(c.magnitude > 0, has_magnitude(c.change));
    words.insert(study_words(c));
    points.insert(c.point);
    changes.insert(c.change);
  }
  EXPECT_GT(words.size(), 150U);
  EXPECT_EQ(points.size(), 4U);
  EXPECT_EQ(changes.size(), 7U);
}

StudyRow made_up(std::int64_t index, double magnitude, bool is_seen) {
  StudyRow row{.index = index, .case_slug = "case_bf16", .composition = "c"};
  row.bug = {.name = "w", .magnitude = magnitude, .ranks = FaultRanks{Axis::kTp, 1}};
  row.bug_ranks = {1, 3};
  row.fired = row.is_visible = row.exact = index >= 0;
  row.within = is_seen;
  if (!is_seen) return row;
  row.within_place = row.blame.at_place = true;
  row.blame.ranks = {1, 3};
  row.blame.cause =
      make_cause(CauseId::kScale, {{"scale", 1 + magnitude}, {"ranks", row.bug_ranks}});
  row.diagnosis = "forward of w: scale 2, which is \"tp\"";
  return row;
}

TEST(StudyTables, CountWhatRowsSay) {
  std::vector<StudyRow> rows = {made_up(-1, 0, false), made_up(0, 0.1, true),
                                made_up(1, 0.1, false), made_up(2, 0.001, false)};

  const std::string text = study_tables(rows);
  const std::vector<SharePanel> panels = sensitivity_panels(rows);

  EXPECT_THAT(text, StartsWith("3 bugs on 1 cases. 0 of them"));
  EXPECT_THAT(text, HasSubstr("| 0.1 | 2 | 100 % | 50 % | 0 % |"));
  EXPECT_THAT(text, HasSubstr("| isoshard, within tolerance | 1 | 100 % |"));
  EXPECT_THAT(text, HasSubstr("| isoshard, exact | 0 of 1 |"));
  EXPECT_THAT(text, HasSubstr("| scale | 1 | 100 % | 0 % | 0 % | 0 % |"));
  ASSERT_EQ(panels.size(), 2U);
  EXPECT_EQ(panels[0].places.front(), "0.1 %");
  EXPECT_EQ(panels[0].lines[1].shares[4], 0.5);
  EXPECT_EQ(panels[0].lines[1].shares[1], std::nullopt) << "no run has it";
  EXPECT_THAT(share_figure(panels, "magnitude"), HasSubstr(">isoshard, exact</text>"));
  EXPECT_EQ(failures_of(rows).missed, 0);
  rows[1].blame.ranks = {0};
  EXPECT_THAT(study_tables(rows), HasSubstr("| scale | 1 | 0 % | 0 % | 100 % | 0 % |"));
  rows[0].within = true;
  rows[2].exact = false;
  EXPECT_EQ(failures_of(rows).false_alarms, 1);
  EXPECT_EQ(failures_of(rows).missed, 1);
}

TEST(StudyTables, CountCausesOfNoiseAsFailures) {
  StudyRow noise = made_up(0, 0.1, true);
  noise.bug.change = FaultChange::kNoise;
  std::vector<StudyRow> rows = {noise, noise, noise, made_up(1, 0.1, true)};
  rows[0].blame.cause = {};
  rows[1].blame.cause = make_cause(CauseId::kEitherCopyWrong, {{"axes", std::vector{"tp"}}});

  const std::string text = noise_table(rows);

  EXPECT_THAT(text, HasSubstr("| no cause | 1 | none |"));
  EXPECT_THAT(text, HasSubstr("| either_copy_wrong | 1 | place only |"));
  EXPECT_THAT(text, HasSubstr("| scale | 1 | wrong |"));
  EXPECT_EQ(failures_of(rows).caused_noise, 1);
  EXPECT_TRUE(failures_of(rows).any());
  rows.erase(rows.begin() + 2);
  EXPECT_FALSE(failures_of(rows).any());
}

class StudyFile : public ::testing::Test {
 protected:
  void write(const std::string& text) const { std::ofstream(path_) << text; }
  std::string problem(const StudyPlan& plan) const {
    try {
      (void)read_study(path_, plan);
    } catch (const FileError& error) {
      return error.what();
    }
    return "";
  }
  void TearDown() override { std::filesystem::remove(path_); }

  std::filesystem::path path_ =
      std::filesystem::path(::testing::TempDir()) / fmt::format("study_{}.csv", ::getpid());
  StudyPlan plan_{.seed = 3};
};

TEST_F(StudyFile, IsReadAsItWasWritten) {
  const StudyRow row = made_up(7, 0.003, true);
  write(study_head(plan_) + to_line(row) + "8,cut off");

  const std::vector<StudyRow> rows = read_study(path_, plan_);

  ASSERT_EQ(rows.size(), 1U) << "the line that a killed run left is no row";
  EXPECT_EQ(to_line(rows[0]), to_line(row));
  EXPECT_EQ(rows[0].diagnosis, row.diagnosis);
  EXPECT_EQ(study_words(rows[0].bug), study_words(row.bug));
  EXPECT_EQ(rows[0].blame.cause.number("scale"), 1.003);
  EXPECT_EQ(rows[0].grade(), CauseGrade::kRight);
  EXPECT_EQ(read_study(path_.string() + ".none", plan_).size(), 0U);
}

TEST_F(StudyFile, OfAnotherStudyIsRefused) {
  write(study_head({.seed = 4}));
  EXPECT_THAT(problem(plan_),
              HasSubstr("seed 3, curves of 100 steps', got '# isoshard faults study, "
                        "seed 4"));
  write(study_head({.seed = 3, .is_noise = true}));
  EXPECT_THAT(problem(plan_), HasSubstr("got '# isoshard faults study, seed 3, noise only"));
  write(study_head(plan_) + "1,2,3\n");
  EXPECT_THAT(problem(plan_), HasSubstr("line 3: must be 31 columns, got '3'"));
  std::string line = to_line(made_up(1, 0.1, true));
  line.replace(line.find("scale"), 5, "sclae");
  write(study_head(plan_) + line);
  EXPECT_THAT(problem(plan_), HasSubstr("must be a name that a study has, got 'sclae'"));
  line = to_line(made_up(1, 0.1, true));
  line.replace(line.find(",scale,\"{") + 1, 5, "sclae");
  write(study_head(plan_) + line);
  EXPECT_THAT(problem(plan_), HasSubstr("must be a cause, got 'sclae'"));
}

}  // namespace
}  // namespace isoshard
