// SPDX-License-Identifier: Apache-2.0
// A pipeline asks for the actions of its schedule, hands on what they make, and computes while it
// does.
#include "subjects/parallel/nd/pipeline.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;

/// Runs a pipeline of one layer a stage on `spec.pp` ranks. Stage s adds 10^s to a micro-batch's
/// number on the way forward, and to its gradient on the way back.
struct Played {
  std::vector<std::vector<std::string>> actions;  ///< by rank
  std::vector<double> results;                    ///< of the last stage, by micro-batch
  std::vector<double> gradients;                  ///< of the first one
};

Played play(const PipelineSpec& spec, const std::function<void(const std::string&)>& on_action = {},
            bool forward_only = false) {
  Played played;
  played.actions.resize(static_cast<std::size_t>(spec.pp));
  played.results.resize(static_cast<std::size_t>(spec.micro_batches));
  played.gradients.resize(static_cast<std::size_t>(spec.micro_batches));
  ThreadWorld world(spec.pp);
  world.set_deadline(std::chrono::steady_clock::now() + std::chrono::seconds(60));
  world.run([&](Communicator& pp) {
    Pipeline pipeline(spec, stages_of(num_stages(spec), num_stages(spec)), {}, pp);
    const std::vector<int> own = stages_of_rank(spec, pp.rank());
    const int last = num_stages(spec) - 1;
    const auto enter = [&](char kind, std::size_t stage, std::size_t m) {
      const PipelineAction action{static_cast<ActionKind>(kind), own[stage], static_cast<int>(m)};
      played.actions[static_cast<std::size_t>(pp.rank())].push_back(to_string(action));
      if (on_action) on_action(to_string(action));
      return at::full({1}, std::pow(10.0, own[stage]), at::kDouble);
    };
    StageWork work;
    work.forward = [&](std::size_t stage, std::size_t m, const at::Tensor& input) {
      const at::Tensor added = enter('F', stage, m);
      const at::Tensor result =
          added + (input.defined() ? input : at::full({1}, static_cast<double>(m), at::kDouble));
      if (own[stage] != last) return result;
      played.results[m] = result.item<double>();
      return at::Tensor();
    };
    const auto back = [&](char kind, std::size_t stage, std::size_t m, const at::Tensor& given) {
      const at::Tensor added = enter(kind, stage, m);
      const at::Tensor gradient =
          added +
          (given.defined() ? given : at::full({1}, 0.5 * static_cast<double>(m), at::kDouble));
      if (own[stage] != 0) return gradient;
      played.gradients[m] = gradient.item<double>();
      return at::Tensor();
    };
    work.backward = [&](std::size_t stage, std::size_t m, const at::Tensor& gradient) {
      return back('B', stage, m, gradient);
    };
    work.backward_input = [&](std::size_t stage, std::size_t m, const at::Tensor& gradient) {
      return back('I', stage, m, gradient);
    };
    work.backward_weight = [&](std::size_t stage, std::size_t m) { (void)enter('W', stage, m); };
    const auto count = static_cast<std::size_t>(spec.micro_batches);
    forward_only ? pipeline.run_forward(count, work) : pipeline.run(count, work);
  });
  return played;
}

std::vector<PipelineSpec> specs() {
  return {pipeline_spec("GPipe", 3, 1, {}, 4),
          pipeline_spec("1F1B", 4, 1, {}, 6),
          pipeline_spec("Interleaved1F1B", 2, 3, {}, 6),
          pipeline_spec("Interleaved1F1B", 3, 2, "V", 6),
          pipeline_spec("InterleavedZeroBubble", 2, 2, {}, 4),
          pipeline_spec("ZBVZeroBubble", 4, 2, {}, 8)};
}

// 111 of three stages, and the micro-batch's own number: none is lost, swapped or taken twice.
TEST(PipelineRun, HandsOnWhatItsActionsMake) {
  for (const PipelineSpec& spec : specs()) {
    SCOPED_TRACE(to_string(spec.kind));
    double ones = 0;
    for (int stage = 0; stage < num_stages(spec); ++stage) ones = 10 * ones + 1;

    const Played played = play(spec);

    for (int m = 0; m < spec.micro_batches; ++m) {
      EXPECT_EQ(played.results[static_cast<std::size_t>(m)], ones + m);
      EXPECT_EQ(played.gradients[static_cast<std::size_t>(m)], ones + 0.5 * m);
    }
  }
}

TEST(PipelineRun, AsksForTheActionsOfItsSchedule) {
  for (const PipelineSpec& spec : specs()) {
    SCOPED_TRACE(to_string(spec.kind));
    const PipelineSchedule schedule = make_schedule(spec);

    const Played played = play(spec);

    for (std::size_t rank = 0; rank < schedule.table.size(); ++rank) {
      std::vector<std::string> wanted;
      for (const auto& action : schedule.table[rank])
        if (action) wanted.push_back(to_string(*action));
      EXPECT_EQ(played.actions[rank], wanted) << "rank " << rank;
    }
  }
}

TEST(PipelineRun, OfForwardsAloneGivesTheSameResults) {
  for (const PipelineSpec& spec : specs()) {
    SCOPED_TRACE(to_string(spec.kind));
    const Played forward = play(spec, {}, true);

    EXPECT_EQ(forward.results, play(spec).results);
    EXPECT_THAT(forward.gradients, ::testing::Each(0.0));
  }
}

// The second stage does not finish its first micro-batch before the first one is at its third: so
// the first stage has sent two results that nobody has taken, and computes on.
TEST(PipelineRun, ComputesWhileItsResultsAreOnTheirWay) {
  std::atomic<bool> is_third_begun = false;

  const Played played = play(pipeline_spec("GPipe", 2, 1, {}, 4), [&](const std::string& action) {
    if (action == "0F2") {
      is_third_begun = true;
      is_third_begun.notify_all();
    }
    if (action == "1F0") is_third_begun.wait(false);
  });

  EXPECT_THAT(played.results, ElementsAre(11, 12, 13, 14));
}

// The other rank waits for what never comes: it is told why, at once.
TEST(PipelineRun, AFailureEndsBothRanksWithItsReason) {
  std::string told;
  try {
    (void)play(pipeline_spec("1F1B", 2, 1, {}, 4), [](const std::string& action) {
      if (action == "1F1") throw UsageError("the real reason");
    });
  } catch (const Error& error) {
    told = error.what();
  }
  EXPECT_THAT(told, ::testing::HasSubstr("the real reason"));
}

}  // namespace
}  // namespace isoshard
