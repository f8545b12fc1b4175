// SPDX-License-Identifier: Apache-2.0
// Training runs tell what a recorded run of the same case tells, and stop where they must.
#include "suite/train/train_case.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>

#include "core/base/hex_float.h"
#include "core/tensor/convert.h"
#include "fixtures/cases/presets.h"
#include "harness/testing/test_folder.h"
#include "suite/faults/test_doubles.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;

constexpr int kCaseSteps = 12;

Case tiny(const std::string& subject, const Degrees& degrees) {
  Case item = tiny_fault_case();
  item.subject = subject;
  item.degrees = degrees;
  item.steps = kCaseSteps;
  return item;
}

TrainOptions perturbed_options() {
  TrainOptions options;
  options.perturbed_by = 1;
  return options;
}

double scalar(const Reference& reference, int step, const char* name, std::int64_t index = 0) {
  return tensor_of(reference.tensor({step, RecordKind::kScalar, name, 0}))
      .flatten()[index]
      .item<double>();
}

TEST(TrainCase, ReferenceIsTheRecordedReferenceBitByBit) {
  const Case item = tiny("reference", {.dp = 3});

  const TrainedCase trained = train_case(item);
  const Reference recorded = make_reference(item, {.responses = 0});

  ASSERT_THAT(trained.curve.steps, SizeIs(kCaseSteps));
  EXPECT_TRUE(trained.is_sound());
  for (int step = 0; step < kCaseSteps; ++step) {
    const CurveStep& numbers = trained.curve.steps[static_cast<std::size_t>(step)];
    EXPECT_EQ(to_hex(numbers.loss), to_hex(scalar(recorded, step, "loss"))) << step;
    EXPECT_EQ(to_hex(numbers.grad_norm), to_hex(scalar(recorded, step, "grad_norm"))) << step;
    ASSERT_THAT(numbers.rank_losses, SizeIs(3));
    for (int dp = 0; dp < 3; ++dp)
      EXPECT_EQ(to_hex(numbers.rank_losses[static_cast<std::size_t>(dp)]),
                to_hex(scalar(recorded, step, "loss_per_dp_rank", dp)));
    EXPECT_EQ(numbers.learning_rate, 0.1);
  }
  EXPECT_NE(trained.curve.steps.front().loss, trained.curve.steps.back().loss);
}

TEST(TrainCase, WorldOfSixTellsEveryDpRanksLoss) {
  const Case item = tiny("autotp", {.dp = 3, .tp = 2});
  ASSERT_EQ(item.world_size(), 6);

  const TrainedCase trained = train_case(item);
  const TrainedCase reference = train_case(tiny("reference", {.dp = 3}));

  ASSERT_THAT(trained.curve.steps, SizeIs(kCaseSteps));
  EXPECT_TRUE(trained.is_sound()) << trained.unequal_numbers;
  EXPECT_EQ(trained.curve.mesh.at("tp"), 2);
  EXPECT_EQ(trained.curve.settings, reference.curve.settings);
  for (std::size_t i = 0; i < trained.curve.steps.size(); ++i) {
    ASSERT_THAT(trained.curve.steps[i].rank_losses, SizeIs(3));
    for (std::size_t dp = 0; dp < 3; ++dp)
      EXPECT_NEAR(trained.curve.steps[i].rank_losses[dp], reference.curve.steps[i].rank_losses[dp],
                  1e-5)
          << i;
  }
  // Every rank has samples of its own.
  EXPECT_GT(
      std::fabs(trained.curve.steps[0].rank_losses[0] - trained.curve.steps[0].rank_losses[1]),
      1e-3);
}

TEST(TrainCase, PerturbedRunIsAnotherRunNearby) {
  const Case item = tiny("reference", {.dp = 2});

  const TrainedCase plain = train_case(item), perturbed = train_case(item, perturbed_options());

  double largest = 0;
  for (std::size_t i = 0; i < plain.curve.steps.size(); ++i)
    largest =
        std::max(largest, std::fabs(plain.curve.steps[i].loss - perturbed.curve.steps[i].loss));
  EXPECT_GT(largest, 0);
  EXPECT_LT(largest, 1e-4);
}

TEST(TrainCase, NanStopsAllRanksAndNamesStepTensorAndRank) {
  const Case item = tiny("autotp", {.dp = 2, .tp = 2});
  TrainOptions options;
  // The third of four ranks; the second of two layers; the fifth step.
  options.run.mutation = [](int rank) -> TapMutation {
    return [rank, steps = std::make_shared<int>(0)](const Site& site, at::Tensor value) {
      if (rank != 2 || site.kind != RecordKind::kActivation || site.name != "model.layers.1.mlp")
        return value;
      return (*steps)++ == 4 ? value * std::numeric_limits<double>::quiet_NaN() : value;
    };
  };

  const TrainedCase trained = train_case(item, options);

  ASSERT_TRUE(trained.non_finite.has_value());
  EXPECT_EQ(trained.non_finite->step, 4);
  EXPECT_EQ(trained.non_finite->number, "loss");
  EXPECT_TRUE(std::isnan(trained.non_finite->value));
  EXPECT_EQ(trained.non_finite->rank, 2);
  ASSERT_TRUE(trained.non_finite->tensor.has_value());
  EXPECT_THAT(trained.non_finite->tensor->name,
              HasSubstr("forward at model.layers.1.mlp (step 4)"));
  EXPECT_EQ(trained.non_finite->tensor->nan, trained.non_finite->tensor->numel);
  EXPECT_THAT(trained.curve.steps, SizeIs(5)) << "up to and with the step that went wrong";
  EXPECT_FALSE(trained.is_sound());
}

TEST(TrainCase, NothingThatIsFineIsTakenForNan) {
  TrainOptions options;
  options.run.mutation = [](int) -> TapMutation {
    return [](const Site& site, at::Tensor value) {
      EXPECT_TRUE(value.isfinite().all().item<bool>()) << site.name;
      return value;
    };
  };

  EXPECT_TRUE(train_case(tiny("ddp", {.dp = 2}), options).is_sound());
}

/// Rank 1's optimizer, of which `change` spoils something after each of its own steps.
auto after_steps_of_rank_1(
    std::function<void(Optimizer& stepped, NamedTensors& parameters)> change) {
  return [change = std::move(change)](TrainerParts& parts, Mesh& mesh) {
    if (mesh.rank() != 1) return;
    parts.optimizer = optimizer_double(
        std::move(parts.optimizer),
        [change](Optimizer& inner, NamedTensors& parameters, const NamedTensors& gradients) {
          inner.step(parameters, gradients);
          change(inner, parameters);
        });
  };
}

void move_a_parameter_further(Optimizer& /*stepped*/, NamedTensors& parameters) {
  parameters.at("model.norm.weight").mul_(1 + 1e-6);
}

TEST(TrainCase, CopiesThatDriftApartAreFoundWithinTenSteps) {
  const Case item = tiny("ddp", {.dp = 2});
  TrainOptions options;
  options.run.edits.parts = after_steps_of_rank_1(move_a_parameter_further);

  const TrainedCase trained = train_case(item, options);

  ASSERT_TRUE(trained.unequal_copies.has_value());
  EXPECT_EQ(trained.unequal_copies->key.step, 9);
  EXPECT_EQ(trained.unequal_copies->key.name, "model.norm.weight.read");
  EXPECT_EQ(trained.unequal_copies->first_rank, 0);
  EXPECT_EQ(trained.unequal_copies->second_rank, 1);
}

TEST(TrainCase, CopiesOverTpAreCompared) {
  Case item = tiny("autotp", {.tp = 2});
  item.steps = 1;
  TrainOptions options;
  options.run.edits.parts = after_steps_of_rank_1(move_a_parameter_further);

  const TrainedCase trained = train_case(item, options);

  ASSERT_TRUE(trained.unequal_copies.has_value()) << "the last step is compared, too";
  EXPECT_EQ(trained.unequal_copies->key.step, 0);
  EXPECT_EQ(trained.unequal_copies->key.name, "model.norm.weight");
}

TEST(TrainCase, CopiesOfOptimizerStateAreCompared) {
  Case item = tiny("ddp", {.dp = 2});
  item.steps = 1;
  TrainOptions options;
  // The parameters are right, the momentum of the next step is not.
  options.run.edits.parts = after_steps_of_rank_1([](Optimizer& stepped, NamedTensors&) {
    const at::Tensor momentum = stepped.state().at("model.norm.weight.momentum_buffer");
    momentum.mul_(1 + 1e-3);
  });

  const TrainedCase trained = train_case(item, options);

  ASSERT_TRUE(trained.unequal_copies.has_value());
  EXPECT_EQ(trained.unequal_copies->key.name, "model.norm.weight.momentum_buffer");
}

TEST(TrainCase, ANormThatOneRankTellsDifferentlyIsNamed) {
  Case item = tiny("ddp", {.dp = 2});
  item.steps = 1;
  TrainOptions options;
  options.run.edits.parts = [](TrainerParts& parts, Mesh& mesh) {
    if (mesh.rank() != 1) return;
    parts.max_grad_norm = 0;  // so that the parameters do not tell it
    parts.grad_norm = grad_norm_double(
        std::move(parts.grad_norm),
        [](GradNorm& inner, const NamedTensors& gradients) { return 1.5 * inner.norm(gradients); });
  };

  const TrainedCase trained = train_case(item, options);

  EXPECT_THAT(trained.unequal_numbers,
              AllOf(HasSubstr("grad_norm of step 0: rank 0 reports"), HasSubstr("rank 1")));
  EXPECT_FALSE(trained.is_sound());
}

TEST(TrainCase, APerturbedRunSavesNoCheckpoint) {
  const TestFolder folder;
  Case item = tiny("reference", {.dp = 2});
  item.steps = item.save_after = 1;
  item.save_path = (folder / "saved").string();

  (void)train_case(item, perturbed_options());
  EXPECT_FALSE(std::filesystem::exists(item.save_path)) << "it would be taken for the run itself";
  (void)train_case(item);
  EXPECT_TRUE(std::filesystem::exists(item.save_path));
}

}  // namespace
}  // namespace isoshard
