// SPDX-License-Identifier: Apache-2.0
// Sums over the holders of one kv head and over nobody else; norms of heads over all of tp.
#include "subjects/parallel/tensor/partial_grad_sum.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

struct KvParameters {
  std::vector<ParameterSpec> specs;
  ShardPlan plan;
};

KvParameters two_heads_on_four_ranks() {
  KvParameters result;
  for (const auto& [name, shape] : {std::pair<std::string, Shape>{"a.k_proj.weight", {6, 2}},
                                    {"a.k_proj.bias", {6}},
                                    {"a.q_proj.bias", {4}}}) {
    ParameterSpec spec;
    spec.name = name;
    spec.shape = shape;
    spec.tp = {TpRole::kColumn, 0, 1, {}, /*is_kv=*/true};
    spec.tp = {TpRole::kColumn, 0, 1, {}, /*is_kv=*/true};
    result.specs.push_back(spec);
    result.plan.kinds[name] =
        name.find("k_proj") != std::string::npos ? ShardKind::kKvReplica : ShardKind::kColumn;
  }
  result.plan.kv_head_of_rank = {0, 0, 1, 1};
  result.plan.num_kv_heads = 2;
  return result;
}

TEST(PartialGradSum, AddsOverTheRanksThatHoldTheSameHeadOnly) {
  const KvParameters kv = two_heads_on_four_ranks();
  ThreadWorld world(4);

  world.run([&](Communicator& tp) {
    ASSERT_EQ(tp.size(), 4);
    const double own = tp.rank() + 1;
    const std::map<std::string, at::Tensor, std::less<>> gradients = {
        {"a.k_proj.weight", at::full({3, 2}, own)},
        {"a.k_proj.bias", at::full({3}, 10 * own)},
        {"a.q_proj.bias", at::full({1}, own)}};
    PartialGradSum sum(kv.specs, kv.plan, tp);
    sum.reduce(gradients);

    const double total = tp.rank() < 2 ? 3 : 7;
    EXPECT_TRUE(at::equal(gradients.at("a.k_proj.weight"), at::full({3, 2}, total)));
    EXPECT_TRUE(at::equal(gradients.at("a.k_proj.bias"), at::full({3}, 10 * total)));
    EXPECT_TRUE(at::equal(gradients.at("a.q_proj.bias"), at::full({1}, own)));
  });
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_EQ(world.journal().num_calls(rank, CollectiveOp::kAllReduce, Purpose::kGradReduce), 1U);
}

TEST(PartialGradSum, AddsNormsOfHeadsOverAllOfTp) {
  ParameterSpec q_norm, norm;
  q_norm.name = "a.q_norm.weight";
  q_norm.shape = norm.shape = {2};
  q_norm.param_class = ParamClass::kQkNorm;
  norm.name = "a.norm.weight";
  norm.param_class = ParamClass::kNorm;
  ThreadWorld world(3);

  world.run([&](Communicator& tp) {
    ASSERT_EQ(tp.size(), 3);
    const double own = tp.rank() + 1;
    const std::map<std::string, at::Tensor, std::less<>> gradients = {
        {q_norm.name, at::full({2}, own)}, {norm.name, at::full({2}, own)}};
    PartialGradSum({q_norm, norm}, ShardPlan{}, tp).reduce(gradients);

    EXPECT_TRUE(at::equal(gradients.at(q_norm.name), at::full({2}, 6.0)));
    EXPECT_TRUE(at::equal(gradients.at(norm.name), at::full({2}, own)));
  });
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(world.journal().num_calls(rank), 1U);
}

TEST(PartialGradSum, ShardsOfOneHeadLieAtOnePlaceAndCountOnce) {
  const KvParameters kv = two_heads_on_four_ranks();
  const MeshShape mesh({{Axis::kTp, 4}});

  for (int rank = 0; rank < 4; ++rank) {
    const std::vector<Box> boxes = boxes_of(kv.plan.layout_of(kv.specs[0], rank), mesh, rank);
    ASSERT_EQ(boxes.size(), 1U);
    EXPECT_EQ(boxes[0].global_offset, (Shape{rank < 2 ? 0 : 3, 0}));
    EXPECT_EQ(boxes[0].size, (Shape{3, 2}));
    EXPECT_EQ(kv.plan.counts_shard(kv.specs[0], rank), rank % 2 == 0);
    EXPECT_TRUE(kv.plan.counts_shard(kv.specs[2], rank));
  }
  EXPECT_EQ(kv.plan.class_of(kv.specs[0]), ParamClass::kKvReplica);
  EXPECT_EQ(kv.plan.class_of(kv.specs[2]), ParamClass::kMatrix);
}

}  // namespace
}  // namespace isoshard
