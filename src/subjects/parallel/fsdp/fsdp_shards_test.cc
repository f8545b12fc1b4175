// SPDX-License-Identifier: Apache-2.0
// What a rank holds and when, and that gradients are those of whole parameters.
#include "subjects/parallel/fsdp/fsdp_shards.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

// Rows that 3 does not divide, and fewer rows than ranks. In elements: root 20, layers.0 28,
// layers.1 64.
const std::vector<std::pair<std::string, Shape>> kParameters = {{"embed.weight", {5, 4}},
                                                                {"layers.0.w", {7, 4}},
                                                                {"layers.1.w", {9, 7}},
                                                                {"layers.1.gain", {1}}};

at::Tensor drawn(const Shape& shape, int seed) {
  return ((at::arange(numel_of(shape), at::kDouble) + 1) * (seed + 1)).sin().view(shape);
}

NamedTensors whole_parameters() {
  NamedTensors parameters;
  for (std::size_t i = 0; i < kParameters.size(); ++i) {
    parameters[kParameters[i].first] =
        drawn(kParameters[i].second, static_cast<int>(i)).requires_grad_(true);
  }
  return parameters;
}

DataParallelSetup setup_of(Mesh& mesh) {
  DataParallelSetup setup;
  const NamedTensors whole = whole_parameters();
  for (const auto& [name, shape] : kParameters)
    setup.parameters.push_back({name, ParamClass::kMatrix, replicated(shape), whole.at(name)});
  setup.mesh = &mesh;
  return setup;
}

using Enter = std::function<void(std::string_view)>;
using Leave = std::function<at::Tensor(std::string_view, at::Tensor)>;

// Two layers and a tied head; `enter` and `leave` stand where a model calls its strategy.
at::Tensor loss_of(const NamedTensors& parameters, int sample, const Enter& enter,
                   const Leave& leave) {
  const at::Tensor ids = at::tensor({sample % 5, (sample + 2) % 5}, at::kLong);
  at::Tensor y = at::embedding(parameters.at("embed.weight"), ids);
  enter("layers.0");
  y = leave("layers.0", at::linear(y, parameters.at("layers.0.w")).tanh());
  enter("layers.1");
  y = leave("layers.1",
            at::linear(y, parameters.at("layers.1.w")).tanh() * parameters.at("layers.1.gain"));
  return at::linear(y.narrow(1, 0, 4), parameters.at("embed.weight")).sum();
}

at::Tensor loss_of(FsdpShards& shards, int sample) {
  return loss_of(
      shards.before_forward(), sample, [&](std::string_view module) { shards.enter_block(module); },
      [&](std::string_view module, at::Tensor output) {
        return shards.leave_block(module, std::move(output));
      });
}

constexpr std::int64_t kDouble = 8;

TEST(FsdpShards, HoldCeilSizedRowsAndGiveTheGradientsOfWholeParameters) {
  NamedTensors whole = whole_parameters();
  for (int sample = 0; sample < 3; ++sample) {
    loss_of(
        whole, sample, [](std::string_view) {},
        [](std::string_view, at::Tensor output) { return output; })
        .backward();
  }
  ThreadWorld world(3);

  world.run([&](Communicator& comm) {
    ASSERT_EQ(comm.size(), 3);
    Mesh mesh(MeshShape({{Axis::kDp, 3}, {Axis::kTp, 1}}), comm);
    FsdpShards shards;
    shards.setup(setup_of(mesh));
    const at::Tensor loss = loss_of(shards, comm.rank());
    shards.before_backward(true);
    loss.backward();
    shards.after_backward(true, true);

    EXPECT_LT(shards.masters().at("layers.1.w").numel(), 63);
    EXPECT_GT(shards.gradients().at("layers.0.w").abs().max().item<double>(), 1e-3)
        << "zeros would prove nothing";
    for (const auto& [name, gradient] : shards.gradients()) {
      const Range rows = dim0_shards(whole.at(name).sizes().vec(), 3)
                             .rows.at(static_cast<std::size_t>(comm.rank()));
      EXPECT_TRUE(at::equal(shards.masters().at(name),
                            whole.at(name).detach().narrow(0, rows.begin, rows.count)))
          << name;
      EXPECT_TRUE(at::allclose(
          gradient, whole.at(name).grad().narrow(0, rows.begin, rows.count) / 3, 1e-13, 1e-15))
          << name;
    }
  });
  // Forward gathers root and two layers, backward the layers again; each is reduced once.
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(world.journal().num_calls(rank, CollectiveOp::kAllGather, Purpose::kParamGather), 5U);
    EXPECT_EQ(world.journal().num_calls(rank, CollectiveOp::kReduceScatter, Purpose::kGradReduce),
              3U);
  }
}

TEST(FsdpShards, NeverHaveMoreGatheredThanTheRootAndTheLargestLayer) {
  ThreadWorld world(3);

  world.run([&](Communicator& comm) {
    Mesh mesh(MeshShape({{Axis::kDp, 3}, {Axis::kTp, 1}}), comm);
    FsdpShards shards;
    shards.setup(setup_of(mesh));
    EXPECT_EQ(shards.gathered().now, 0);
    const at::Tensor loss = loss_of(shards, comm.rank());
    // With padding: embed 6 x 4, layers.0 9 x 4, layers.1 9 x 7 and a gain of 3.
    EXPECT_EQ(shards.gathered().now, 24 * kDouble) << "between forward and backward the root alone";
    shards.before_backward(true);
    loss.backward();
    shards.after_backward(true, true);

    EXPECT_EQ(shards.gathered().now, 0);
    EXPECT_EQ(shards.gathered().peak, (24 + 66) * kDouble);
  });
}

TEST(FsdpShards, AddUpReducedGradientsOfMicroBatches) {
  NamedTensors whole = whole_parameters();
  for (int sample = 0; sample < 4; ++sample) {
    loss_of(
        whole, sample, [](std::string_view) {},
        [](std::string_view, at::Tensor output) { return output; })
        .backward();
  }
  ThreadWorld world(2);

  world.run([&](Communicator& comm) {
    Mesh mesh(MeshShape({{Axis::kDp, 2}, {Axis::kTp, 1}}), comm);
    FsdpShards shards;
    shards.setup(setup_of(mesh));
    shards.clear_gradients();
    for (int m = 0; m < 2; ++m) {
      const at::Tensor loss = loss_of(shards, 2 * m + comm.rank());
      shards.before_backward(m == 1);
      loss.backward();
      shards.after_backward(m == 1, m == 1);
    }

    for (const auto& [name, gradient] : shards.gradients()) {
      const Range rows = dim0_shards(whole.at(name).sizes().vec(), 2)
                             .rows.at(static_cast<std::size_t>(comm.rank()));
      EXPECT_TRUE(at::allclose(
          gradient, whole.at(name).grad().narrow(0, rows.begin, rows.count) / 2, 1e-13, 1e-15))
          << name;
    }
  });
  EXPECT_EQ(world.journal().num_calls(0, CollectiveOp::kReduceScatter, Purpose::kGradReduce), 6U);
}

TEST(FsdpShards, KeepMastersWiderThanWhatForwardReads) {
  ThreadWorld world(2);

  world.run([&](Communicator& comm) {
    Mesh mesh(MeshShape({{Axis::kDp, 2}, {Axis::kTp, 1}}), comm);
    DataParallelSetup setup = setup_of(mesh);
    for (HeldParameter& parameter : setup.parameters)
      parameter.tensor = parameter.tensor.detach().to(at::kBFloat16).requires_grad_(true);
    setup.master_dtype = Dtype::kFloat32;
    FsdpShards shards(Dtype::kFloat32);
    shards.setup(std::move(setup));
    const at::Tensor loss = loss_of(shards, comm.rank());
    shards.before_backward(true);
    loss.backward();
    shards.after_backward(true, true);

    EXPECT_EQ(loss.scalar_type(), at::kBFloat16);
    EXPECT_EQ(shards.masters().at("layers.0.w").scalar_type(), at::kFloat);
    EXPECT_EQ(shards.gradients().at("layers.0.w").scalar_type(), at::kFloat);
    EXPECT_EQ(shards.held().at("layers.0.w").scalar_type(), at::kBFloat16);
    // The average of two bf16 numbers has a bit more than bf16: it was not rounded to that.
    const at::Tensor gradient = shards.gradients().at("embed.weight");
    if (comm.rank() == 0) {
      EXPECT_FALSE(at::equal(gradient, gradient.to(at::kBFloat16).to(at::kFloat)));
    }
  });
}

TEST(FsdpShards, OfOneRankRoundNothingToTheReduceDtype) {
  NamedTensors whole = whole_parameters();
  loss_of(
      whole, 0, [](std::string_view) {}, [](std::string_view, at::Tensor output) { return output; })
      .backward();
  ThreadWorld world(1);

  world.run([&](Communicator& comm) {
    Mesh mesh(MeshShape({{Axis::kDp, 1}, {Axis::kTp, 1}}), comm);
    FsdpShards shards(Dtype::kBFloat16);
    shards.setup(setup_of(mesh));
    const at::Tensor loss = loss_of(shards, 0);
    shards.before_backward(true);
    loss.backward();
    shards.after_backward(true, true);

    for (const auto& [name, gradient] : shards.gradients()) {
      EXPECT_TRUE(at::allclose(gradient, whole.at(name).grad(), 1e-13, 1e-15)) << name;
    }
  });
}

TEST(FsdpShards, EvaluationsLeaveOneRootGroupGatheredHoweverManyThereAre) {
  ThreadWorld world(3);

  world.run([](Communicator& comm) {
    Mesh mesh(MeshShape({{Axis::kDp, 3}, {Axis::kTp, 1}}), comm);
    FsdpShards shards;
    shards.setup(setup_of(mesh));
    for (int evaluation = 0; evaluation < 3; ++evaluation) {
      const at::NoGradGuard no_grad;
      (void)loss_of(shards, comm.rank());
      EXPECT_EQ(shards.gathered().now, 24 * kDouble) << "after evaluation " << evaluation;
    }
  });
}

TEST(FsdpShards, RefuseABlockWithoutParameters) {
  ThreadWorld world(1);

  world.run([](Communicator& comm) {
    Mesh mesh(MeshShape({{Axis::kDp, 1}, {Axis::kTp, 1}}), comm);
    FsdpShards shards;
    shards.setup(setup_of(mesh));
    EXPECT_THROW(shards.enter_block("layers.2"), UsageError);
    EXPECT_THROW(shards.enter_block(""), UsageError);
  });
}

}  // namespace
}  // namespace isoshard
