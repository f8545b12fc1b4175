// SPDX-License-Identifier: Apache-2.0
// The shards of tp 1, 2 and 3, put together, are the undivided initial weights, bit for bit.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <limits>

#include "core/comm/tensor.h"
#include "core/mesh/mesh.h"
#include "fixtures/inputs/inputs.h"
#include "harness/testing/run_world.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/train/trainer.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

at::Tensor box_of(const at::Tensor& whole, const Shape& offset, const Shape& size) {
  at::Tensor part = whole;
  for (std::size_t d = 0; d < size.size(); ++d)
    part = part.narrow(static_cast<std::int64_t>(d), offset[d], size[d]);
  return part;
}

// Puts all ranks' shards where their layouts say.
at::Tensor gathered(Communicator& tp, const at::Tensor& local, const ShardPlan& plan,
                    const ParameterSpec& spec) {
  const at::NoGradGuard no_grad;
  const at::Tensor shards = all_gather(tp, local.detach().unsqueeze(0).contiguous(),
                                       {Purpose::kParamGather, Axis::kTp, {}});
  const MeshShape mesh({{Axis::kTp, tp.size()}});
  const at::Tensor whole = at::full(spec.shape, std::numeric_limits<double>::quiet_NaN(),
                                    local.options().requires_grad(false));
  for (int rank = 0; rank < tp.size(); ++rank) {
    for (const Box& box : boxes_of(plan.layout_of(spec, rank), mesh, rank)) {
      box_of(whole, box.global_offset, box.size)
          .copy_(box_of(shards[rank], box.local_offset, box.size));
    }
  }
  return whole;
}

class Initialisation : public ::testing::TestWithParam<Case> {};

TEST_P(Initialisation, ShardsArePartsOfTheUndividedWeights) {
  const Case item = GetParam();

  const std::vector<int> num_sharded = run_world(item.degrees.tp, [item](Rank& rank) {
    Mesh mesh(item.mesh(), rank.comm());
    EXPECT_EQ(mesh.degree(Axis::kTp), item.degrees.tp);
    const auto weights = case_weights(item);
    Trainer trainer(autotp_parts(trainer_config(item, weights), mesh), mesh, nullptr);
    trainer.setup();
    const ShardPlan plan = autotp_plan(*make_model(item.config, item.attention), item.degrees.tp);
    int sharded = 0;
    for (const ParameterSpec& spec : trainer.specs()) {
      const int dim = plan.sharded_dim(spec);
      const at::Tensor& local = trainer.parameters().at(spec.name);
      EXPECT_EQ(local.numel() * (dim < 0 ? 1 : item.degrees.tp), numel_of(spec.shape)) << spec.name;
      const at::Tensor whole = weights->read(spec, Shape(spec.shape.size(), 0), spec.shape)
                                   .to(scalar_type_of(item.dtype));
      EXPECT_TRUE(at::equal(gathered(mesh.group(Axis::kTp), local, plan, spec), whole))
          << spec.name;
      sharded += dim < 0 ? 0 : 1;
    }
    return sharded;
  });

  // 2 layers: q, k, v (with biases in qwen2), o, gate, up, down; in gpt2 c_attn, c_fc (with biases)
  // and two c_proj. One rank leaves the two row layers of a block alone.
  ASSERT_EQ(num_sharded.size(), static_cast<std::size_t>(item.degrees.tp));
  const int expected = (item.config.model_type == "gpt2" ? 12
                        : item.config.qkv_bias           ? 20
                                                         : 14) -
                       (item.degrees.tp == 1 ? 4 : 0);
  for (const int sharded : num_sharded) EXPECT_EQ(sharded, expected);
}

TEST_P(Initialisation, AnotherSeedGivesOtherWeights) {
  Case item = GetParam();
  const auto first = case_weights(item);
  item.seed = 1;
  const auto second = case_weights(item);

  for (const ParameterSpec& spec : make_model(item.config, item.attention)->parameters()) {
    const Shape zero(spec.shape.size(), 0);
    EXPECT_FALSE(
        at::equal(first->read(spec, zero, spec.shape), second->read(spec, zero, spec.shape)))
        << spec.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Initialisation,
                         ::testing::Values(step_case("autotp", {}), step_case("autotp", {.tp = 2}),
                                           step_case("autotp", {.tp = 3}),
                                           step_case("autotp", {.tp = 3}, Dtype::kBFloat16),
                                           step_case("autotp", {.tp = 2}, Dtype::kFloat32, "qwen3"),
                                           step_case("autotp", {.tp = 3}, Dtype::kFloat32, "llama"),
                                           step_case("autotp", {.tp = 2}, Dtype::kFloat32, "gpt2"),
                                           step_case("autotp", {.tp = 3}, Dtype::kBFloat16,
                                                     "gpt2")),
                         case_name);

}  // namespace
}  // namespace isoshard
