// SPDX-License-Identifier: Apache-2.0
// Training and evaluation of one trainer: what drops, what does
// not, and that neither leaves a trace in the other.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>

#include "core/comm/thread/thread_world.h"
#include "harness/testing/test_folder.h"
#include "subjects/model/config/builtin.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/train/parts.h"

namespace isoshard {
namespace {

TokenBatch a_batch() {
  const at::Tensor ids = (at::arange(26, at::kLong) * 31).remainder(96).view({2, 13});
  return {ids, ids, {0, 1}};
}

void with_trainer(double dropout, const std::function<void(Trainer&)>& body,
                  const std::filesystem::path& resumed = {}) {
  TrainerConfig config;
  config.model = builtin_config("tiny-gpt2");
  set_dropout(config.model, dropout);
  config.weights = std::make_shared<InitialWeights>(0, 0.02, true);
  ThreadWorld world(1);
  world.run([&](Communicator& comm) {
    Mesh mesh(MeshShape({{Axis::kDp, 1}, {Axis::kTp, 1}}), comm);
    Trainer trainer(plain_parts(config, mesh, 1), mesh, nullptr);
    if (resumed.empty()) {
      trainer.setup();
    } else {
      trainer.resume(resumed);
    }
    body(trainer);
  });
}

double loss_of_step(Trainer& trainer) {
  const TokenBatch batch = a_batch();
  trainer.forward_backward({&batch, 1});
  return trainer.loss();
}

double evaluated(Trainer& trainer) {
  const TokenBatch batch = a_batch();
  return trainer.evaluate({&batch, 1});
}

TEST(TrainEval, AnEvaluationIsTheStepWithoutDropout) {
  double plain = 0;
  with_trainer(0, [&](Trainer& trainer) { plain = loss_of_step(trainer); });

  with_trainer(0.3, [&](Trainer& trainer) {
    EXPECT_EQ(evaluated(trainer), plain);
    EXPECT_NE(loss_of_step(trainer), plain) << "the step dropped nothing";
    EXPECT_EQ(evaluated(trainer), plain) << "the step left training on";
  });
}

TEST(TrainEval, SwitchedOffTrainingDropsNothingUntilItIsSwitchedOn) {
  double plain = 0;
  with_trainer(0, [&](Trainer& trainer) { plain = loss_of_step(trainer); });

  with_trainer(0.3, [&](Trainer& trainer) {
    trainer.set_training(false);
    EXPECT_EQ(loss_of_step(trainer), plain);
    trainer.set_training(true);
    EXPECT_NE(loss_of_step(trainer), plain);
  });
}

TEST(TrainEval, SwitchedOffTrainingIsOffInTheRunThatResumes) {
  const TestFolder on, off;
  double plain = 0;
  with_trainer(0, [&](Trainer& trainer) { plain = loss_of_step(trainer); });
  with_trainer(0.3, [&](Trainer& trainer) {
    trainer.save(on.path());
    trainer.set_training(false);
    trainer.save(off.path());
  });

  with_trainer(
      0.3, [&](Trainer& trainer) { EXPECT_EQ(loss_of_step(trainer), plain); }, off.path());
  with_trainer(
      0.3, [&](Trainer& trainer) { EXPECT_NE(loss_of_step(trainer), plain); }, on.path());
}

TEST(TrainEval, AnEvaluationBetweenStepsChangesNothingInThem) {
  const auto second_loss = [](bool evaluates) {
    double loss = 0;
    with_trainer(0.3, [&](Trainer& trainer) {
      const TokenBatch batch = a_batch();
      trainer.train_step({&batch, 1});
      if (evaluates) (void)evaluated(trainer);
      loss = loss_of_step(trainer);
    });
    return loss;
  };

  EXPECT_EQ(second_loss(true), second_loss(false));
}

}  // namespace
}  // namespace isoshard
