// SPDX-License-Identifier: Apache-2.0
/// What one verdict is made of: the emulated arithmetic where it is declared, the plain reference
/// everywhere.
#include "suite/verify/verify_case.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "core/base/error.h"
#include "suite/record/registry.h"
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
                               const std::function<void(Arithmetic&)>& breaks) {
    JudgePlan plan{.run = options};
    plan.arithmetic = [breaks](const Case& c) {
      Arithmetic arithmetic = arithmetic_of(c);
      breaks(arithmetic);
      return arithmetic;
    };
    return CaseJudge(std::move(plan)).judge_case(item);
  };
  const auto loses_an_entry = [](Arithmetic& arithmetic) {
    arithmetic.vocabulary->by_rank.front().count -= 1;
  };
  const auto parts_copies = [](Arithmetic& arithmetic) {
    arithmetic.column_input_gradient.is_made = false;
  };

  for (const auto& breaks : {std::function<void(Arithmetic&)>(loses_an_entry),
                             std::function<void(Arithmetic&)>(parts_copies)}) {
    const CaseJudgement judgement = judged_with(wrong, breaks);
    EXPECT_EQ(judgement.verdict.status, Status::kDiverges) << judgement.verdict.reason;
    EXPECT_EQ(judgement.against, ReferenceKind::kPlain);
    ASSERT_FALSE(judgement.verdict.findings.empty());
    EXPECT_EQ(judgement.verdict.findings.front().key.name, "model.norm");
    EXPECT_THROW((void)judged_with({}, breaks), InfrastructureError)
        << "a right run does not mend the record";
  }
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
