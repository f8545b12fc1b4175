// SPDX-License-Identifier: Apache-2.0
// The shards of tp 1, 2 and 3, put together, are the undivided initial weights, bit for bit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "comm/tensor.h"
#include "conformance/subjects/step_test.h"
#include "fixtures/cases/inputs.h"
#include "harness/testing/run_world.h"
#include "mesh/mesh.h"
#include "parallel/tensor/autotp_plan.h"
#include "train/trainer.h"

namespace isoshard {
namespace {

at::Tensor gathered(Communicator& tp, const at::Tensor& local, int dim) {
  const at::NoGradGuard no_grad;
  if (dim < 0) return local.detach();
  // all_gather joins along dim 0.
  return all_gather(tp, local.detach().transpose(0, dim).contiguous(), {Purpose::kParamGather, Axis::kTp, {}}).transpose(0, dim);
}

class Initialisation : public ::testing::TestWithParam<Case> {};

TEST_P(Initialisation, ShardsArePartsOfTheUndividedWeights) {
  const Case item = GetParam();

  const std::vector<int> num_sharded = run_world(item.tp, [item](Rank& rank) {
    Mesh mesh(item.mesh(), rank.comm());
    EXPECT_EQ(mesh.degree(Axis::kTp), item.tp);
    const auto weights = case_weights(item);
    Trainer trainer(autotp_parts(trainer_config(item, weights), mesh), mesh, nullptr);
    trainer.setup();
    const ShardPlan plan = autotp_plan(trainer.specs());
    int sharded = 0;
    for (const ParameterSpec& spec : trainer.specs()) {
      const int dim = plan.sharded_dim(spec);
      const at::Tensor& local = trainer.parameters().at(spec.name);
      EXPECT_EQ(local.numel() * (dim < 0 ? 1 : item.tp), numel_of(spec.shape)) << spec.name;
      const at::Tensor whole = weights->read(spec, Shape(spec.shape.size(), 0), spec.shape).to(scalar_type_of(item.dtype));
      EXPECT_TRUE(at::equal(gathered(mesh.group(Axis::kTp), local, dim), whole)) << spec.name;
      sharded += dim < 0 ? 0 : 1;
    }
    return sharded;
  });

  // 2 layers of q, k, v (weight and bias), o, gate, up, down.
  ASSERT_EQ(num_sharded.size(), static_cast<std::size_t>(item.tp));
  for (const int sharded : num_sharded) EXPECT_EQ(sharded, 20);
}

TEST_P(Initialisation, AnotherSeedGivesOtherWeights) {
  Case item = GetParam();
  const auto first = case_weights(item);
  item.seed = 1;
  const auto second = case_weights(item);

  for (const ParameterSpec& spec : make_model(item.config, item.attention)->parameters()) {
    const Shape zero(spec.shape.size(), 0);
    EXPECT_FALSE(at::equal(first->read(spec, zero, spec.shape), second->read(spec, zero, spec.shape))) << spec.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Initialisation,
                         ::testing::Values(step_case("autotp", 1, 1), step_case("autotp", 1, 2), step_case("autotp", 1, 3),
                                           step_case("autotp", 1, 3, Dtype::kBFloat16)),
                         case_name);

}  // namespace
}  // namespace isoshard
