// SPDX-License-Identifier: Apache-2.0
/// Claims about reading the numbers of a run by what they are.
#include "harness/trace/run_view.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;

void record_scalar(Sink& sink, NameRole role, const at::Tensor& value) {
  sink.on_record(site(RecordKind::kScalar, scalar_name(role), layout_of(value.sizes().vec())),
                 value);
}

const Body kStep = [](Sink& sink, int) {
  sink.on_record(site(RecordKind::kGrad, "w", layout_of({2})), at::tensor({1.0, 2.0}));
  sink.on_record(site(RecordKind::kGrad, "w.clipped", layout_of({2})), at::tensor({0.5, 1.0}));
  sink.on_record(site(RecordKind::kOptimizer, "w.exp_avg", layout_of({2})), at::tensor({3.0, 4.0}));
  record_scalar(sink, NameRole::kGradNorm, at::tensor({2.5}, at::kDouble));
  record_scalar(sink, NameRole::kLearningRate, at::tensor({0.125}, at::kDouble));
  record_scalar(sink, NameRole::kLossScale, at::tensor({1024.0}, at::kDouble));
};

TEST(RunView, ReadsTheSameNumbersFromAReferenceAndFromARank) {
  const Reference one = reference(kStep);
  const Trace several = run(kDp2Tp3, nullptr, kStep, Keep::kEverything);

  for (const RunView view : {RunView(one), RunView(several.ranks[4])}) {
    EXPECT_EQ(view.grad_norm(0), 2.5);
    EXPECT_EQ(view.learning_rate(0), 0.125);
    EXPECT_EQ(view.loss_scale(0), 1024.0);
    EXPECT_EQ(view.first_element(0, NameRole::kGradNorm), 2.5);
  }
}

TEST(RunView, HasNothingWhereNothingIsRecorded) {
  const Reference one = reference(kStep);
  const RunView view(one);

  EXPECT_EQ(view.grad_norm(1), std::nullopt);
  EXPECT_EQ(view.found_inf(0), std::nullopt);
  EXPECT_EQ(view.first_element(0, NameRole::kLoss), std::nullopt);
  EXPECT_EQ(view.scalar(0, NameRole::kLoss), nullptr);
  EXPECT_FALSE(view.is_skipped(0));
}

TEST(RunView, FindsARecordByThePartsOfItsName) {
  const Reference one = reference(kStep);
  const RunView view(one);

  const Record* const clipped = view.value(0, RecordKind::kGrad, {"w", NameRole::kClipped});
  const Record* const moment =
      view.value(0, RecordKind::kOptimizer, {"w", NameRole::kState, "exp_avg"});

  ASSERT_NE(clipped, nullptr);
  EXPECT_EQ(clipped->key, (RecordKey{0, RecordKind::kGrad, "w.clipped", 0}));
  ASSERT_NE(moment, nullptr);
  EXPECT_EQ(moment->key, (RecordKey{0, RecordKind::kOptimizer, "w.exp_avg", 0}));
  EXPECT_EQ(view.value(0, RecordKind::kOptimizer, {"w", NameRole::kState, "exp_avg_sq"}), nullptr);
}

TEST(RunView, DoesNotSeeWhatARankDidNotKeep) {
  const Trace bare = run(kDp2Tp3, nullptr, kStep, Keep::kNothing);
  const RecordKey key{0, RecordKind::kGrad, "w", 0};

  ASSERT_NE(bare.ranks[0].find(key), nullptr);
  EXPECT_EQ(RunView(bare.ranks[0]).find(key), nullptr);
  EXPECT_EQ(RunView(bare.ranks[0]).grad_norm(0), std::nullopt);
}

TEST(RunView, AStepIsSkippedIfAnyFlagOfInfinityIsSet) {
  for (const bool is_set : {false, true}) {
    const Reference one = reference([&](Sink& sink, int) {
      record_scalar(sink, NameRole::kFoundInf, at::tensor({0.0, is_set ? 1.0 : 0.0}));
    });

    EXPECT_EQ(RunView(one).found_inf(0), is_set);
    EXPECT_EQ(RunView(one).is_skipped(0), is_set);
  }
}

TEST(RunView, ANumberHasOneElement) {
  const Reference one = reference([](Sink& sink, int) {
    record_scalar(sink, NameRole::kGradNorm, at::tensor({2.5, 3.0}, at::kDouble));
    record_scalar(sink, NameRole::kLoss, at::empty({0}, at::kDouble));
  });

  EXPECT_THROW(static_cast<void>(RunView(one).grad_norm(0)), VacuousError);
  EXPECT_EQ(RunView(one).first_element(0, NameRole::kGradNorm), 2.5);
  EXPECT_EQ(RunView(one).first_element(0, NameRole::kLoss), std::nullopt);
}

}  // namespace
}  // namespace isoshard
