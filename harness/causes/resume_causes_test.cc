// SPDX-License-Identifier: Apache-2.0
/// Causes that show only where a run was saved and loaded, on made-up runs with dp 2 and tp 3.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "harness/testing/diagnosed_run.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using causes_testing::cause_of;

/// A run that is saved behind step 1 and loaded: the state is recorded once more, and step 2 draws
/// masks. `mask` is [12], or a rank's [2].
Body reloaded(const std::array<double, 2>& moments, double weight,
              const std::function<at::Tensor(int rank)>& mask) {
  return [=](Sink& sink, int rank) {
    const std::array<std::string, 2> names = {"model.layers.0.mlp.gate_proj.weight",
                                              "model.layers.0.mlp.up_proj.weight"};
    const auto state = [&](const std::array<double, 2>& values, double parameter) {
      for (std::size_t i = 0; i < names.size(); ++i) {
        sink.on_record(site(RecordKind::kOptimizer, names[i] + ".exp_avg", layout_of({4})),
                       at::full({4}, values[i], at::kDouble));
        sink.on_record(site(RecordKind::kParam, names[i], layout_of({4})),
                       at::full({4}, parameter, at::kDouble));
      }
    };
    const auto drop = [&](const at::Tensor& part) {
      const bool is_whole = part.numel() == 12;
      const std::vector<Placement> cut = {shard(Axis::kDp, 0), shard(Axis::kTp, 0)};
      sink.on_record(site(RecordKind::kMask, "drop",
                          layout_of({12}, is_whole ? std::vector<Placement>() : cut)),
                     part);
    };
    sink.begin_step(1);
    state({1, 2}, 3);
    state(moments, weight);
    sink.begin_step(2);
    drop(mask(rank));
  };
}

at::Tensor whole_mask(int) {
  return at::tensor({1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1}, at::kLong).to(at::kBool);
}
at::Tensor own_mask(int rank) {
  return whole_mask(rank).narrow(0, 2 * rank, 2);
}

TEST(ResumeCauses, OptimizerStateOfAnotherOwnerAfterALoadIsTold) {
  const auto told = [](const std::array<double, 2>& moments, double weight) {
    return cause_of(reloaded({1, 2}, 3, whole_mask), reloaded(moments, weight, own_mask));
  };

  EXPECT_THAT(told({2, 1}, 3),
              IsCause(CauseId::kOptimizerStatesSwapped, {{"state", "moments"},
                                                         {"module", "mlp.gate_proj"},
                                                         {"other", "mlp.up_proj"},
                                                         {"parameters_are_right", true}}));
  EXPECT_THAT(told({2, 1}, 4),
              IsCause(CauseId::kOptimizerStatesSwapped, {{"state", "moments"},
                                                         {"module", "mlp.gate_proj"},
                                                         {"other", "mlp.up_proj"},
                                                         {"parameters_are_right", false}}));
  EXPECT_THAT(told({2, 2}, 3),
              IsCause(CauseId::kOptimizerStateOfOther, {{"state", "moments"},
                                                        {"module", "mlp.gate_proj"},
                                                        {"other", "mlp.up_proj"},
                                                        {"parameters_are_right", true}}));
  EXPECT_THAT(told({5, 2}, 3), IsCause(CauseId::kScale, {{"scale", 5}})) << "it was nobody's";
}

TEST(ResumeCauses, WhatIsLoadedIsNoStepThatWasNotMade) {
  const auto body = [](bool whole) {
    return Body([=](Sink& sink, int) {
      const at::Tensor right = values({12}, 1), own = whole ? right : right + values({12}, 2);
      for (int step = 0; step < 3; ++step) {
        if (step > 0) sink.begin_step(step);
        const auto parameter = [&](const at::Tensor& value) {
          sink.on_record(site(RecordKind::kParam, "m.w", layout_of({12})), value);
        };
        if (step == 0) parameter(right);
        parameter(step == 0 ? right : own + step);
        if (step == 1) parameter(own + step);  // loaded as it was saved
      }
    });
  };

  EXPECT_THAT(cause_of(body(true), body(false)), IsNoCause());
}

/// Both moments of one parameter, saved and loaded.
Cause second_moment_is(
    const std::function<at::Tensor(at::Tensor first, at::Tensor second)>& loaded) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      const at::Tensor first = values({12}, 1), second = first.square();
      const auto state = [&](const at::Tensor& of_squares) {
        sink.on_record(site(RecordKind::kOptimizer, "m.w.exp_avg", layout_of({12})), first);
        sink.on_record(site(RecordKind::kOptimizer, "m.w.exp_avg_sq", layout_of({12})), of_squares);
      };
      sink.begin_step(1);
      state(second);
      state(whole ? second : loaded(first, second));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ResumeCauses, AnotherStateOfTheSameParameterIsTold) {
  EXPECT_THAT(second_moment_is([](auto first, auto) { return first; }),
              IsCause(CauseId::kOptimizerStateOfOtherKind,
                      {{"state", "exp_avg_sq"}, {"parameter", "m.w"}, {"other", "exp_avg"}}));
  EXPECT_THAT(second_moment_is([](auto, auto second) { return 2 * second; }),
              IsCause(CauseId::kScaleOfFormula, {{"formula", "dp"}, {"scale", 2}}));
}

TEST(ResumeCauses, MasksOfAnotherRanksStreamAfterAResumeAreTold) {
  const auto told = [](const std::function<at::Tensor(int)>& mask) {
    return cause_of(reloaded({1, 2}, 3, whole_mask), reloaded({1, 2}, 3, mask));
  };

  EXPECT_THAT(told([](int) { return own_mask(0); }),
              IsCause(CauseId::kMasksOfOtherRank, {{"ranks", std::vector{1, 2, 3, 4, 5}},
                                                   {"owner_rank", 0},
                                                   {"was_right_before", false}}));
  EXPECT_THAT(told([](int rank) { return own_mask(rank == 4 ? 2 : rank); }),
              IsCause(CauseId::kMasksOfOtherRank,
                      {{"ranks", std::vector{4}}, {"owner_rank", 2}, {"was_right_before", false}}));
  EXPECT_THAT(told([](int rank) {
                return own_mask(rank == 3 ? 0 : rank == 4 ? 2 : rank);
              }),
              IsCause(CauseId::kOneMaskForSamples))
      << "two ranks with masks of two others";
}

/// Where a run stands after step 1, and once more after it was loaded; it takes 6 samples a step.
struct Progress {
  std::array<double, 2> updates = {2, 2};
  std::array<double, 3> rng = {0, 7, 2};
  std::int64_t first_sample = 12;
};

Body progressing(const Progress& saved, const Progress& loaded) {
  return [=](Sink& sink, int) {
    const auto record = [&](const Progress& at_) {
      sink.on_record(site(RecordKind::kScalar, "optimizer_steps", layout_of({2})),
                     at::tensor({at_.updates[0], at_.updates[1]}, at::kDouble));
      sink.on_record(site(RecordKind::kScalar, "rng_state", layout_of({3})),
                     at::tensor({at_.rng[0], at_.rng[1], at_.rng[2]}, at::kDouble));
    };
    const auto next = [&](std::int64_t first) {
      sink.on_record(site(RecordKind::kDataId, "next_sample_ids", layout_of({6})),
                     at::arange(first, first + 6, at::kLong));
    };
    next(6);
    sink.begin_step(1);
    record(saved);
    next(loaded.first_sample);
    record(loaded);
    sink.begin_step(2);
    next(18);
  };
}

TEST(ResumeCauses, WhereALoadedRunStandsIsTold) {
  const auto told = [](const Progress& saved, const Progress& loaded) {
    return cause_of(progressing({}, {}), progressing(saved, loaded));
  };

  EXPECT_THAT(
      told({}, {.updates = {1, 1}}),
      IsCause(CauseId::kUpdatesMiscounted,
              {{"after_resume", true}, {"was_right_before", true}, {"counted", 1}, {"made", 2}}));
  EXPECT_THAT(
      told({.updates = {1, 1}}, {}),
      IsCause(CauseId::kUpdatesMiscounted,
              {{"after_resume", false}, {"was_right_before", false}, {"counted", 1}, {"made", 2}}));
  EXPECT_THAT(
      told({}, {.rng = {0, 8, 2}}),
      IsCause(CauseId::kOtherMaskSeed, {{"after_resume", true}, {"was_right_before", true}}));
  EXPECT_THAT(
      told({}, {.rng = {0, 7, 1}}),
      IsCause(CauseId::kMasksOfOtherStep,
              {{"after_resume", true}, {"was_right_before", true}, {"step", 1}, {"expected", 2}}));
  EXPECT_THAT(told({}, {.first_sample = 18}), IsCause(CauseId::kSamplerAhead, {{"steps", 1}}));
  EXPECT_THAT(told({}, {.first_sample = 6}), IsCause(CauseId::kSamplerBehind, {{"steps", 1}}));
  EXPECT_THAT(told({}, {.first_sample = 13}), IsCause(CauseId::kIdsTooLarge))
      << "no step begins there";
}

}  // namespace
}  // namespace isoshard
