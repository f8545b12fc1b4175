// SPDX-License-Identifier: Apache-2.0
/// Claims about findings of another program: they decide the verdict, and every report shows it.
#include "harness/compare/given_findings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "harness/compare/compare.h"
#include "harness/report/formats/report_formats.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using testing::ThrowsMessage;

Finding finding_at(int step, RecordKind kind, const char* name, const char* what) {
  Finding finding;
  finding.key = {step, kind, name, 0};
  finding.stage = stage_of(finding.key);
  finding.what = what;
  return finding;
}

TensorComparison tensor_at(RecordKind kind, const char* name) {
  TensorComparison tensor;
  tensor.key = {0, kind, name, 0};
  tensor.stage = stage_of(tensor.key);
  return tensor;
}

Verdict verdict_of(Status status) {
  Verdict verdict;
  verdict.status = status;
  verdict.strength = status == Status::kConforms ? Strength::kExact : Strength::kNone;
  verdict.reason = "3 tensors compared";
  verdict.tensors = {tensor_at(RecordKind::kDataId, "ids"),
                     tensor_at(RecordKind::kActivation, "embed"),
                     tensor_at(RecordKind::kActivation, "norm")};
  return verdict;
}

Verdict diverging_at(RecordKind kind, const char* name) {
  Verdict verdict = verdict_of(Status::kDiverges);
  verdict.findings = {finding_at(0, kind, name, "own")};
  verdict.findings.front().diagnosis = "scale 2";
  verdict.reason = "first own; scale 2";
  return verdict;
}

GivenFindings whole_batch() {
  return {.findings = {finding_at(0, RecordKind::kDataId, "ids", "every rank has all samples")},
          .causes = {}};
}

TEST(GivenFindings, MakeARunDivergeThatConformedOrWasVacuous) {
  for (const Status status : {Status::kConforms, Status::kVacuous}) {
    Verdict verdict = verdict_of(status);
    verdict.shows_too_little = status == Status::kVacuous;

    add_given_findings(whole_batch(), verdict);

    EXPECT_EQ(verdict.status, Status::kDiverges);
    EXPECT_EQ(verdict.strength, Strength::kNone);
    EXPECT_FALSE(verdict.shows_too_little);
    ASSERT_EQ(verdict.findings.size(), 1U);
    EXPECT_EQ(verdict.reason, "first every rank has all samples");
  }
}

TEST(GivenFindings, ComeBeforeTheVerdictsOwnOfTheirStage) {
  Verdict ids = diverging_at(RecordKind::kDataId, "ids");
  Verdict forward = diverging_at(RecordKind::kActivation, "embed");
  Verdict settings = diverging_at(RecordKind::kScalar, "learning_rate");

  for (Verdict* verdict : {&ids, &forward, &settings}) add_given_findings(whole_batch(), *verdict);

  EXPECT_EQ(ids.findings.front().what, "every rank has all samples");
  EXPECT_EQ(forward.findings.front().what, "every rank has all samples");
  EXPECT_EQ(settings.findings.front().what, "own");
  EXPECT_EQ(settings.findings.size(), 2U);
}

TEST(GivenFindings, KeepTheirOrder) {
  Verdict verdict = verdict_of(Status::kConforms);
  GivenFindings given = whole_batch();
  given.findings.push_back(finding_at(0, RecordKind::kDataId, "labels", "so have labels"));

  add_given_findings(given, verdict);

  ASSERT_EQ(verdict.findings.size(), 2U);
  EXPECT_EQ(verdict.findings[0].key.name, "ids");
  EXPECT_EQ(verdict.findings[1].key.name, "labels");
}

TEST(GivenCauses, ExplainOnlyARunThatDivergesAndNothingBeforeTheirTensor) {
  GivenFindings given;
  given.causes = {
      {.key = {0, RecordKind::kActivation, "norm", 0},
       .cause = make_cause(CauseId::kBatchStatistics, {{"module", "norm"}, {"modules", 1}})}};
  Verdict right = verdict_of(Status::kConforms);
  Verdict there = diverging_at(RecordKind::kActivation, "norm");
  Verdict before = diverging_at(RecordKind::kActivation, "embed");

  for (Verdict* verdict : {&right, &there, &before}) add_given_findings(given, *verdict);

  EXPECT_EQ(right.status, Status::kConforms);
  EXPECT_TRUE(right.notes.empty());
  EXPECT_EQ(there.findings.front().diagnosis, given.causes[0].cause.text + "; scale 2");
  EXPECT_THAT(there.findings.front().cause, IsCause(CauseId::kBatchStatistics, {{"modules", 1}}));
  EXPECT_THAT(before.findings.front().cause, IsNoCause());
  EXPECT_EQ(before.findings.front().diagnosis, "scale 2");
  EXPECT_EQ(before.notes.size(), 1U);
}

TEST(GivenCauses, LeaveTheIdOfTheJudgesOwnCause) {
  GivenFindings given;
  given.causes = {{.key = {0, RecordKind::kActivation, "norm", 0},
                   .cause = make_cause(CauseId::kNoDataSampler)}};
  Verdict verdict = diverging_at(RecordKind::kActivation, "norm");
  verdict.findings.front().cause = make_cause(CauseId::kScale, {{"scale", 2}});

  add_given_findings(given, verdict);

  EXPECT_THAT(verdict.findings.front().cause, IsCause(CauseId::kScale, {{"scale", 2}}));
}

TEST(GivenNotes, ChangeNoVerdict) {
  for (const Status status : {Status::kConforms, Status::kVacuous, Status::kDiverges}) {
    Verdict verdict = status == Status::kDiverges ? diverging_at(RecordKind::kActivation, "norm")
                                                  : verdict_of(status);
    const std::string reason = verdict.reason;
    verdict.notes = {"own"};

    add_given_findings({.findings = {}, .causes = {}, .notes = {"a", "b"}}, verdict);

    EXPECT_EQ(verdict.status, status);
    EXPECT_EQ(verdict.reason, reason);
    EXPECT_THAT(verdict.notes, testing::ElementsAre("own", "a", "b"));
  }
}

std::string in_words_of_others(std::string_view words) {
  return make_cause(CauseId::kGivenCause, {NamedValue::words("problem", words)}).text;
}

TEST(GivenFindings, AreReadFromAFile) {
  const TestFolder folder;
  const auto path = folder / "findings.json";
  std::ofstream(path) << R"({"schema": 1,
      "findings": [{"step": 1, "kind": "data_id", "name": "ids", "what": "is whole",
                    "cause": "no sampler", "ranks": [0, 3]}],
      "causes": [{"step": 0, "kind": "scalar", "name": "loss", "text": "means of means"}],
      "notes": ["the reference is the same script"],
      "call_sites": {"0/grad/w/0": "train.py:7"}})";

  const GivenFindings given = read_given_findings(path);

  ASSERT_EQ(given.findings.size(), 1U);
  EXPECT_EQ(given.findings[0].key, (RecordKey{1, RecordKind::kDataId, "ids", 0}));
  EXPECT_EQ(given.findings[0].stage, Stage::kDataIds);
  EXPECT_THAT(given.findings[0], FindingIs(FindingId::kGiven, {{"problem", "is whole"}}));
  EXPECT_EQ(given.findings[0].diagnosis, in_words_of_others("no sampler"));
  EXPECT_THAT(given.findings[0].cause, IsCause(CauseId::kGivenCause));
  EXPECT_THAT(given.findings[0].ranks, testing::ElementsAre(0, 3));
  ASSERT_EQ(given.causes.size(), 1U);
  EXPECT_EQ(given.causes[0].key.kind, RecordKind::kScalar);
  EXPECT_THAT(given.notes, testing::ElementsAre("the reference is the same script"));
  EXPECT_THAT(given.call_sites, testing::ElementsAre(testing::Pair("0/grad/w/0", "train.py:7")));
}

TEST(GivenFindings, SomeAreAddedOnlyToARunThatDivergesAtTheirPlaceOrLater) {
  const auto finding_at = [](RecordKind kind) {
    return make_finding({0, kind, "b", 0}, FindingId::kGiven,
                        {NamedValue::words("problem", "differs")});
  };
  const auto first_of = [&](std::vector<RecordKind> own) {
    Verdict verdict;
    verdict.status = own.empty() ? Status::kConforms : Status::kDiverges;
    for (const RecordKind kind : own) verdict.findings.push_back(finding_at(kind));
    add_given_findings(
        {.findings = {}, .if_diverging = {finding_at(RecordKind::kActivation)}, .causes = {}},
        verdict);
    return std::pair(verdict.status, verdict.findings.size());
  };

  EXPECT_EQ(first_of({}), std::pair(Status::kConforms, std::size_t{0}));
  EXPECT_EQ(first_of({RecordKind::kDataId}), std::pair(Status::kDiverges, std::size_t{1}));
  EXPECT_EQ(first_of({RecordKind::kGrad}), std::pair(Status::kDiverges, std::size_t{2}));
}

TEST(GivenFindings, ACauseNamesTheRanksOfANumberThatAllRanksShare) {
  const auto ranks_after = [](const char* name) {
    Verdict verdict;
    verdict.status = Status::kDiverges;
    verdict.findings.push_back(make_finding({0, RecordKind::kScalar, "loss", 0}, FindingId::kGiven,
                                            {NamedValue::words("problem", "is wrong")}));
    verdict.findings.front().ranks = {0, 1};
    const Cause cause = make_cause(
        CauseId::kLossRounded, {{"ranks", std::vector{1}}, {"dtype", "bf16"}, {"output", "head"}});
    add_given_findings({.findings = {}, .causes = {{{0, RecordKind::kScalar, name, 0}, cause}}},
                       verdict);
    return verdict.findings.front().ranks;
  };

  EXPECT_THAT(ranks_after("loss"), testing::ElementsAre(1));
  EXPECT_THAT(ranks_after("learning_rate"), testing::ElementsAre(0, 1));
}

TEST(GivenFindings, AFindingHasTheCallSiteOfItsTensor) {
  Verdict verdict;
  verdict.status = Status::kDiverges;
  for (const char* const name : {"v", "w"})
    verdict.findings.push_back(make_finding({0, RecordKind::kGrad, name, 0}, FindingId::kGiven,
                                            {NamedValue::words("problem", "is wrong")}));

  add_given_findings({.findings = {}, .causes = {}, .call_sites = {{"0/grad/w/0", "train.py:7"}}},
                     verdict);

  EXPECT_EQ(verdict.findings[0].call_site, "");
  EXPECT_EQ(verdict.findings[1].call_site, "train.py:7");
}

TEST(GivenFindings, MayHaveAnIdAndValuesInPlaceOfWords) {
  const TestFolder folder;
  const auto path = folder / "findings.json";
  std::ofstream(path) << R"({"schema": 1, "causes": [],
      "findings": [{"step": 1, "kind": "data_id", "name": "ids", "ranks": [0, 1],
                    "cause": {"id": "own_samples_on_each_rank", "numbers": {"samples": 16}},
                    "finding": {"id": "samples_not_shared",
                                "numbers": {"samples": 8, "having": 2, "data_ranks": 2}}},
                   {"step": 1, "kind": "data_id", "name": "ids", "cause": "", "ranks": [0, 1],
                    "finding": {"id": "equal_inputs", "numbers": {"ranks": [0, 1]}}}]})";

  const GivenFindings given = read_given_findings(path);

  EXPECT_THAT(
      given.findings,
      testing::ElementsAre(FindingIs(FindingId::kSamplesNotShared,
                                     {{"samples", 8}, {"having", 2}, {"data_ranks", 2}}),
                           FindingIs(FindingId::kEqualInputs, {{"ranks", std::vector{0, 1}}})));
  EXPECT_THAT(given.findings[0].cause, IsCause(CauseId::kOwnSamplesOnEachRank, {{"samples", 16}}));
  EXPECT_THAT(given.findings[1].cause, IsNoCause());
}

TEST(GivenFindings, ThatAreMalformedAreRefused) {
  const TestFolder folder;
  const auto path = folder / "findings.json";
  for (const char* text :
       {R"({"schema": 1, "findings": [], "causes": [], "notes": [1]})", "[]", "{",
        R"({"schema": 2, "findings": [], "causes": []})", R"({"schema": 1})",
        R"({"schema": 1, "causes": [], "findings": [{"kind": "coffee", "name": "x"}]})",
        R"({"schema": 1, "causes": [], "findings": [{"kind": "data_id", "name": "x", "cause": "",
            "ranks": [0], "finding": {"id": "no_such_finding"}}]})",
        R"({"schema": 1, "causes": [], "findings": [{"kind": "data_id", "name": "x", "cause": "",
            "ranks": [0], "finding": {"id": "equal_inputs", "numbers": {"ranks": [0, "1"]}}}]})",
        R"({"schema": 1, "causes": [], "findings": [{"kind": "data_id", "name": "x", "cause": "",
            "ranks": [0], "finding": {"id": "equal_inputs", "numbers": {}}}]})",
        R"({"schema": 1, "causes": [], "findings": [{"kind": "data_id", "name": "x", "cause": "",
            "ranks": [0], "finding": {"id": "differs_from_reference"}}]})",
        R"({"schema": 1, "findings": [], "causes": [{"kind": "scalar", "name": "x", "step": 0,
            "cause": {"id": "scale", "numbers": {"scale": 2}}}]})",
        R"({"schema": 1, "findings": [], "causes": [{"kind": "scalar", "name": "x", "step": 0,
            "cause": {"id": "batch_statistics", "numbers": {"modules": 1}}}]})",
        R"({"schema": 1, "causes": [], "findings": [{"kind": "data_id", "name": "x"}]})"}) {
    std::ofstream(path, std::ios::trunc) << text;
    EXPECT_THAT([&] { (void)read_given_findings(path); },
                ThrowsMessage<FileError>(StartsWith(path.string())))
        << text;
  }
}

TEST(GivenFindings, MustComeWithTwoBundles) {
  ComparePlan plan;
  plan.given = whole_batch();
  plan.input_dir = "runs";
  EXPECT_THROW(require_comparable(plan), UsageError);
  plan.input_dir.clear();
  plan.reference = "loss_reference.json";
  plan.actual = "loss_ddp.json";
  EXPECT_THROW(require_comparable(plan), UsageError);
}

TEST(GivenFindings, AreInEveryFormat) {
  ReportCase item{.name = "train", .verdict = verdict_of(Status::kConforms)};
  add_given_findings(whole_batch(), *item.verdict);
  Report report;
  report.add(std::move(item));

  EXPECT_EQ(report.exit_code, 1);
  for (const ReportFormat& format : report_formats()) {
    const std::string text = format.write(report, {});
    EXPECT_THAT(text, HasSubstr("every rank has all samples")) << format.name;
    EXPECT_THAT(text, Not(HasSubstr("CONFORMS"))) << format.name;
  }
  EXPECT_THAT(find_report_format("junit").write(report, {}), HasSubstr("failures=\"1\""));
}

}  // namespace
}  // namespace isoshard
