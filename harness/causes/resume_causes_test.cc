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
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using causes_testing::diagnosis_of;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

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
    return diagnosis_of(reloaded({1, 2}, 3, whole_mask), reloaded(moments, weight, own_mask));
  };
  const std::string swapped =
      "optimizer state after load: moments of mlp.gate_proj and mlp.up_proj are swapped";

  EXPECT_THAT(told({2, 1}, 3), HasSubstr(swapped + "; parameters right"));
  EXPECT_THAT(told({2, 1}, 4), AllOf(HasSubstr(swapped), Not(HasSubstr("parameters right"))));
  EXPECT_THAT(
      told({2, 2}, 3),
      HasSubstr(
          "moments of mlp.gate_proj are those that were saved of mlp.up_proj; parameters right"));
  EXPECT_THAT(told({5, 2}, 3), Not(HasSubstr("after load"))) << "it was nobody's";
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

  EXPECT_THAT(diagnosis_of(body(true), body(false)), Not(HasSubstr("not updated")));
}

/// Both moments of one parameter, saved and loaded.
std::string second_moment_is(
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
  return diagnosis_of(body(true), body(false));
}

TEST(ResumeCauses, AnotherStateOfTheSameParameterIsTold) {
  EXPECT_THAT(
      second_moment_is([](auto first, auto) { return first; }),
      HasSubstr("optimizer state after load: exp_avg_sq of m.w is what was saved as exp_avg"));
  EXPECT_THAT(second_moment_is([](auto, auto second) { return 2 * second; }),
              Not(HasSubstr("after load")));
}

TEST(ResumeCauses, MasksOfAnotherRanksStreamAfterAResumeAreTold) {
  const auto told = [](const std::function<at::Tensor(int)>& mask) {
    return diagnosis_of(reloaded({1, 2}, 3, whole_mask), reloaded({1, 2}, 3, mask));
  };

  EXPECT_THAT(told([](int) { return own_mask(0); }),
              HasSubstr("after resume: masks of ranks 1..5 equal the mask of rank 0"));
  EXPECT_THAT(told([](int rank) { return own_mask(rank == 4 ? 2 : rank); }),
              HasSubstr("after resume: mask of rank 4 equals the mask of rank 2"));
  EXPECT_THAT(told([](int rank) {
                return own_mask(rank == 3 ? 0 : rank == 4 ? 2 : rank);
              }),
              Not(HasSubstr("after resume")))
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
    return diagnosis_of(progressing({}, {}), progressing(saved, loaded));
  };

  EXPECT_THAT(told({}, {.updates = {1, 1}}),
              HasSubstr("after resume: 1 updates counted, 2 were made; right before saving"));
  EXPECT_THAT(told({.updates = {1, 1}}, {}),
              AllOf(HasSubstr("1 updates counted, 2 were made"), Not(HasSubstr("after resume"))));
  EXPECT_THAT(told({}, {.rng = {0, 8, 2}}),
              HasSubstr("after resume: another seed of masks; right before saving"));
  EXPECT_THAT(told({}, {.rng = {0, 7, 1}}), HasSubstr("masks of step 1, expected 2"));
  EXPECT_THAT(told({}, {.first_sample = 18}), HasSubstr("sampler 1 step ahead"));
  EXPECT_THAT(told({}, {.first_sample = 6}), HasSubstr("sampler 1 step behind"));
  EXPECT_THAT(told({}, {.first_sample = 13}), Not(HasSubstr("sampler"))) << "no step begins there";
}

}  // namespace
}  // namespace isoshard
