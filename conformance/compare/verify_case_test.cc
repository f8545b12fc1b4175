// SPDX-License-Identifier: Apache-2.0
/// What one verdict is made of: the emulated arithmetic where it is declared, the plain reference
/// everywhere.
#include "suite/verify/verify_case.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "harness/testing/is_cause.h"
#include "suite/record/make_subject.h"
#include "suite/record/run_case.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;

CaseJudgement judged(const Case& item, ReferenceKind kind, const RunOptions& options = {},
                     Retention retention = Retention::kLean) {
  return CaseJudge({.reference = kind, .retention = retention, .run = options}).judge_case(item);
}

Case six_ranks(Dtype dtype) {
  Case item = step_case("autotp", {.dp = 3, .tp = 2}, dtype);
  EXPECT_EQ(item.world_size(), 6);
  return item;
}

TEST(CaseJudge, ARunThatEqualsItsDeclaredArithmeticConformsOnBothCounts) {
  for (const auto& [kind, retention] : {std::pair(ReferenceKind::kAuto, Retention::kLean),
                                        std::pair(ReferenceKind::kBoth, Retention::kWhole)}) {
    const CaseJudgement judgement = judged(six_ranks(Dtype::kBFloat16), kind, {}, retention);

    EXPECT_EQ(judgement.verdict.status, Status::kConforms) << judgement.verdict.reason;
    EXPECT_EQ(judgement.against, ReferenceKind::kBoth);
    EXPECT_EQ(judgement.verdict.subject, "autotp");
    EXPECT_GT(judgement.verdict.compared, 100);
    EXPECT_EQ(judgement.verdict.equal_to_emulation, judgement.verdict.compared);
    EXPECT_THAT(judgement.verdict.reason, HasSubstr("bit-identical to the emulated reference"));
  }
}

TEST(CaseJudge, APlainVerdictHoldsCallsToTheTableToo) {
  Case item = step_case("ddp", {.dp = 2});
  RunOptions other_buckets;
  other_buckets.edits.parts = [](TrainerParts& parts, Mesh&) { parts.bucket_bytes = 4096; };

  const Verdict right = judged(item, ReferenceKind::kPlain).verdict,
                wrong = judged(item, ReferenceKind::kPlain, other_buckets).verdict;

  EXPECT_EQ(right.status, Status::kConforms) << right.reason;
  EXPECT_THAT(right.collectives, HasSubstr("were compared with the subject's table"));
  ASSERT_EQ(wrong.status, Status::kDiverges) << wrong.reason;
  EXPECT_EQ(wrong.findings.front().stage, Stage::kCollectives) << wrong.reason;
}

// In bf16 the second of two large steps says little alone: a halved gradient would pass. Bit by bit
// it cannot.
TEST(CaseJudge, WhatShowsTooLittleWithinTolerancesIsShownByTheEmulation) {
  Case item = six_ranks(Dtype::kBFloat16);
  item.steps = 2;
  item.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;
  item.settings.optimizer.learning_rate = 0.05;

  const CaseJudgement alone = judged(item, ReferenceKind::kPlain),
                      exact = judged(item, ReferenceKind::kAuto);

  ASSERT_EQ(alone.verdict.status, Status::kVacuous) << alone.verdict.reason;
  EXPECT_GT(alone.verdict.weak, 0);
  EXPECT_EQ(exact.verdict.status, Status::kConforms) << exact.verdict.reason;
  EXPECT_GT(exact.verdict.weak, 0);
  EXPECT_THAT(exact.verdict.reason, HasSubstr("are inconclusive alone"));
}

// Around a ring instead of in rank order: legal for a user's subject, but not what ours declares.
TEST(CaseJudge, ARunWithinTolerancesThatIsNotTheDeclaredArithmeticDiverges) {
  const Case item = six_ranks(Dtype::kBFloat16);
  RunOptions around_a_ring;
  around_a_ring.order = ReductionOrder::kRing;

  EXPECT_EQ(judged(item, ReferenceKind::kPlain, around_a_ring).verdict.status, Status::kConforms);
  const CaseJudgement judgement = judged(item, ReferenceKind::kAuto, around_a_ring);

  EXPECT_EQ(judgement.verdict.status, Status::kDiverges);
  EXPECT_EQ(judgement.against, ReferenceKind::kEmulated);
}

TEST(CaseJudge, ARunThatIsWrongIsDescribedAgainstThePlainReference) {
  const Case item = six_ranks(Dtype::kFloat32);
  RunOptions wrong;
  wrong.mutation = [](int rank) -> TapMutation {
    return [rank](const Site& site, at::Tensor value) {
      return rank == 1 && site.name == "model.layers.1.mlp.down_proj" ? value * 1.5 : value;
    };
  };

  const CaseJudgement judgement = judged(item, ReferenceKind::kAuto, wrong);

  ASSERT_EQ(judgement.verdict.status, Status::kDiverges);
  EXPECT_EQ(judgement.against, ReferenceKind::kPlain);
  ASSERT_FALSE(judgement.verdict.findings.empty());
  EXPECT_EQ(judgement.verdict.findings.front().key.name, "model.layers.1.mlp.down_proj");
}

// One mistake in a plan breaks the record and the run.
TEST(CaseJudge, ARunWhoseRecordCannotBeCarriedOutIsJudgedAgainstThePlainReference) {
  Case item = six_ranks(Dtype::kFloat32);
  item.settings.make_vocab_size_divisible_by = 1;
  RunOptions wrong;
  wrong.mutation = [](int rank) -> TapMutation {
    return [rank](const Site& site, at::Tensor value) {
      return rank == 1 && site.name == "model.norm" ? value * 1.5 : value;
    };
  };
  const auto judged_with = [&](const RunOptions& options,
                               const std::function<void(NumericsSpec&)>& breaks) {
    JudgePlan plan{.run = options};
    plan.numerics = [breaks](const Case& c) {
      NumericsSpec numerics = numerics_of(c);
      breaks(numerics);
      return numerics;
    };
    return CaseJudge(std::move(plan)).judge_case(item);
  };
  const auto loses_an_entry = [](NumericsSpec& numerics) {
    numerics.vocabulary->by_rank.front().count -= 1;
  };
  const auto parts_copies = [](NumericsSpec& numerics) {
    numerics.tensor.column_input_gradient.is_made = false;
  };

  for (const auto& breaks : {std::function<void(NumericsSpec&)>(loses_an_entry),
                             std::function<void(NumericsSpec&)>(parts_copies)}) {
    const CaseJudgement judgement = judged_with(wrong, breaks);
    EXPECT_EQ(judgement.verdict.status, Status::kDiverges) << judgement.verdict.reason;
    EXPECT_EQ(judgement.against, ReferenceKind::kPlain);
    ASSERT_FALSE(judgement.verdict.findings.empty());
    EXPECT_EQ(judgement.verdict.findings.front().key.name, "model.norm");
    EXPECT_THROW((void)judged_with({}, breaks), InfrastructureError)
        << "a right run does not mend the record";
  }
}

/// One element of an early output moves by an ulp of bf16, which a tolerance hides, and a late
/// gradient is half as large again, which none does.
RunOptions wrong_early_and_late() {
  RunOptions options;
  options.mutation = [](int) -> TapMutation {
    return [](const Site& site, at::Tensor value) {
      if (site.kind == RecordKind::kActivationGrad && site.name == "model.layers.1.mlp")
        return value * 1.5;
      if (site.kind != RecordKind::kActivation || site.name != "model.layers.0.mlp.down_proj")
        return value;
      at::Tensor moved = value.clone();
      moved.select(0, 0).select(0, 0).select(0, 0).mul_(1 + 0x1p-7);
      return moved;
    };
  };
  return options;
}

TEST(CaseJudge, In16BitsTheFindingOfTheExactComparisonCounts) {
  for (const Retention retention : {Retention::kLean, Retention::kWhole}) {
    const CaseJudgement judgement = judged(six_ranks(Dtype::kBFloat16), ReferenceKind::kAuto,
                                           wrong_early_and_late(), retention);

    const Verdict& verdict = judgement.verdict;
    ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
    EXPECT_EQ(judgement.against, ReferenceKind::kEmulated);
    const Finding& first = verdict.findings.front();
    EXPECT_EQ(first.key.name, "model.layers.0.mlp.down_proj") << verdict.reason;
    EXPECT_EQ(first.stage, Stage::kForward);
    EXPECT_THAT(verdict.reason, ::testing::Not(HasSubstr("forward right")));
  }
  const Verdict plain =
      judged(six_ranks(Dtype::kBFloat16), ReferenceKind::kPlain, wrong_early_and_late()).verdict;
  ASSERT_EQ(plain.status, Status::kDiverges);
  EXPECT_EQ(plain.findings.front().stage, Stage::kActivationGrad)
      << "within tolerances a later tensor is the first";
}

// Rows of a table that its first micro-batch does not read, and a later one does.
TEST(CaseJudge, SumsOfLaterMicroBatchesAreJudgedWithinTolerances) {
  Case item = step_case("autotp", {.tp = 2}, Dtype::kFloat64);
  item.micro_batches = 3;
  item.settings.optimizer.kind = OptimizerSettings::Kind::kAdamW;

  const Verdict verdict = judged(item, ReferenceKind::kPlain).verdict;

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
}

/// Wrong in the runs of these numbers only: each rank knows which run it is by its process's name.
RunOptions wrong_in(const std::string& name) {
  RunOptions options;
  options.mutation = [name](int rank) -> TapMutation {
    std::string own;
    std::getline(std::ifstream("/proc/self/comm"), own);
    if (own != name || rank != 1) return {};
    return [](const Site& site, at::Tensor value) {
      return site.name == "model.layers.1.mlp.down_proj" ? value * (1 + 0x1p-20) : value;
    };
  };
  return options;
}

void expect_not_repeatable(const CaseJudgement& judgement, int run, const std::string& what) {
  const Verdict& verdict = judgement.verdict;
  EXPECT_EQ(verdict.status, Status::kDiverges) << what << ": " << verdict.reason;
  EXPECT_EQ(verdict.strength, Strength::kNone);
  const std::string words = "run " + std::to_string(run) + " differs from run 1";
  EXPECT_THAT(verdict.reason, HasSubstr("not repeatable: " + words)) << what;
  ASSERT_FALSE(verdict.findings.empty());
  const Finding& first = verdict.findings.front();
  EXPECT_EQ(first.key.name, "model.layers.1.mlp.down_proj") << what;
  EXPECT_EQ(first.ranks, std::vector<int>{1}) << what;
  EXPECT_THAT(first.what, HasSubstr(words));
  EXPECT_THAT(first.cause, IsCause(CauseId::kNotRepeatable, {{"run", run}}));
}

// What a run that is wrong once gets past is a judge that runs it again and forgets the first time.
TEST(CaseJudge, ARunThatIsWrongOnceIsNotRepeatableInEveryFlow) {
  const Case item = six_ranks(Dtype::kFloat32);
  const RunOptions first = wrong_in("iso:autotp/1"), second = wrong_in("iso:autotp/2");
  const auto judged_by = [&](JudgePlan plan) {
    return CaseJudge(std::move(plan)).judge_case(item);
  };

  expect_not_repeatable(judged_by({.run = first}), 2, "auto");
  expect_not_repeatable(judged_by({.tables = true, .run = first}), 2, "with tables");
  expect_not_repeatable(judged_by({.retention = Retention::kWhole, .run = first}), 2, "whole");
  for (const ReferenceKind kind :
       {ReferenceKind::kAuto, ReferenceKind::kPlain, ReferenceKind::kEmulated}) {
    const std::string name(name_of(kind));
    expect_not_repeatable(judged_by({.reference = kind, .repeat = 2, .run = first}), 2, name);
    expect_not_repeatable(judged_by({.reference = kind, .repeat = 3, .run = second}), 2, name);
    EXPECT_EQ(judged_by({.reference = kind, .run = second}).verdict.status, Status::kConforms)
        << "there is no second run";
  }
}

TEST(CaseJudge, ARunThatIsWrongOnceDoesNotPassBecauseItsRecordCannotBeCarriedOut) {
  Case item = six_ranks(Dtype::kFloat32);
  item.settings.make_vocab_size_divisible_by = 1;
  JudgePlan plan{.run = wrong_in("iso:autotp/1")};
  plan.numerics = [](const Case& c) {
    NumericsSpec numerics = numerics_of(c);
    numerics.vocabulary->by_rank.front().count -= 1;
    return numerics;
  };

  expect_not_repeatable(CaseJudge(std::move(plan)).judge_case(item), 2, "no record");
}

TEST(CaseJudge, RunsSayHowOftenTheSubjectWasRun) {
  const Case item = six_ranks(Dtype::kFloat32);

  EXPECT_EQ(judged(item, ReferenceKind::kAuto).verdict.runs, 1);
  const Verdict verdict = CaseJudge({.repeat = 4}).judge_case(item).verdict;

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_EQ(verdict.runs, 4);
  EXPECT_EQ(verdict.strength, Strength::kExact);
  EXPECT_EQ(verdict.copy_of, "DeepSpeed AutoTP");
}

TEST(CaseJudge, LatticeModelsAreEqualToThePlainReference) {
  Case item = lattice_case();
  item.subject = "autotp";
  item.degrees.dp = 3;
  item.degrees.tp = 2;

  const CaseJudgement judgement = judged(item, ReferenceKind::kAuto);

  EXPECT_EQ(judgement.verdict.status, Status::kConforms) << judgement.verdict.reason;
  EXPECT_EQ(judgement.against, ReferenceKind::kPlain);
  EXPECT_THAT(judgement.verdict.reason, HasSubstr("no tolerance"));
}

}  // namespace
}  // namespace isoshard
