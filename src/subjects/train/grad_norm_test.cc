// SPDX-License-Identifier: Apache-2.0
// The global norm counts split gradients from every rank and replicated ones once.
#include "subjects/train/grad_norm.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

TEST(GlobalGradNorm, CountsShardsFromEveryRankAndReplicasOnce) {
  ParameterSpec split;
  split.name = "m.q_proj.weight";
  split.shape = {6, 2};
  split.tp = {TpRole::kColumn, 0};
  ParameterSpec whole;
  whole.name = "m.norm.weight";
  whole.shape = {2};
  ShardPlan plan;
  plan.kinds[split.name] = ShardKind::kColumn;
  const at::Tensor split_gradient = at::arange(1, 13, at::kFloat).view({6, 2});
  const at::Tensor whole_gradient = at::tensor({3.0F, 4.0F});
  ThreadWorld world(3);

  world.run([&](Communicator& tp) {
    ASSERT_EQ(tp.size(), 3);
    GlobalGradNorm grad_norm({split, whole}, plan, tp);
    const at::Tensor shard = split_gradient.chunk(3, 0)[static_cast<std::size_t>(tp.rank())];
    ASSERT_LT(shard.numel(), split_gradient.numel());

    const double norm = grad_norm.norm({{split.name, shard}, {whole.name, whole_gradient}});

    EXPECT_EQ(norm, std::sqrt(650.0 + 25.0));
  });
}

TEST(GlobalGradNorm, CountsACopiedKvHeadOnce) {
  ParameterSpec kv;
  kv.name = "m.k_proj.weight";
  kv.shape = {2, 2};
  kv.tp = {TpRole::kColumn, 0};
  ShardPlan plan;
  plan.kinds[kv.name] = ShardKind::kKvReplica;
  plan.kv_head_of_rank = {0, 0, 1, 1};
  plan.num_kv_heads = 2;
  ThreadWorld world(4);

  world.run([&](Communicator& tp) {
    ASSERT_EQ(tp.size(), 4);
    const at::Tensor own = tp.rank() < 2 ? at::tensor({1.0F, 2.0F}).view({1, 2})
                                         : at::tensor({3.0F, 4.0F}).view({1, 2});

    EXPECT_EQ(GlobalGradNorm({kv}, plan, tp).norm({{kv.name, own}}), std::sqrt(30.0));
  });
}

TEST(GlobalGradNorm, OneRankGivesTheBitsOfAPlanWithoutShards) {
  ParameterSpec split;
  split.name = "m.q_proj.weight";
  split.shape = {7, 3};
  split.tp = {TpRole::kColumn, 0};
  ParameterSpec whole;
  whole.name = "m.norm.weight";
  whole.shape = {5};
  ShardPlan plan;
  plan.kinds[split.name] = ShardKind::kColumn;
  const NamedTensors gradients = {{split.name, at::linspace(-1, 1.7, 21).view({7, 3})},
                                  {whole.name, at::linspace(0.1, 0.7, 5)}};
  ThreadWorld world(1);

  world.run([&](Communicator& tp) {
    const double with_plan = GlobalGradNorm({split, whole}, plan, tp).norm(gradients);
    const double without = GlobalGradNorm({split, whole}, ShardPlan{}, tp).norm(gradients);

    EXPECT_EQ(with_plan, without);
  });
}

}  // namespace
}  // namespace isoshard
