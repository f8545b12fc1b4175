// SPDX-License-Identifier: Apache-2.0
// A rank of fsdp_tp holds what docs/reference/subjects.md predicts.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/observe/layer_name.h"
#include "fixtures/inputs/inputs.h"
#include "harness/testing/run_world.h"
#include "subjects/parallel/fsdp/dim_shards.h"
#include "subjects/parallel/fsdp/fsdp_shards.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/train/parts.h"
#include "suite/record/batches.h"
#include "suite/testing/fsdp_cases.h"

namespace isoshard {
namespace {

struct Bytes {
  double parameters = 0, gradients = 0, optimizer = 0, gathered = 0;
};

// The formula, from the shapes of the model alone. AdamW.
Bytes predicted(const Case& item) {
  const auto model = make_model(item.config, item.attention);
  const ShardPlan plan = autotp_plan(*model, item.degrees.tp);
  std::map<std::string, double> groups;
  double elements = 0;
  for (const ParameterSpec& spec : model->parameters()) {
    const double part = static_cast<double>(numel_of(spec.shape)) /
                        (plan.sharded_dim(spec) < 0 ? 1 : item.degrees.tp);
    groups[std::string(layer_of(spec.name))] += part;
    elements += part;
  }
  double largest = 0;
  for (const auto& [module, size] : groups) largest = std::max(largest, module.empty() ? 0 : size);
  const auto computed = static_cast<double>(size_of(item.dtype));
  const auto stepped =
      static_cast<double>(size_of(item.settings.master_dtype.value_or(item.dtype)));
  const double shard = elements * stepped / item.degrees.dp;
  return {shard, shard, 2 * shard, (groups.at("") + largest) * computed};
}

double bytes_of(const NamedTensors& tensors) {
  double bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += static_cast<double>(tensor.nbytes());
  return bytes;
}

// Of every rank after a step.
std::vector<std::vector<double>> measured(const Case& item) {
  return run_world(item.world_size(), [item](Rank& rank) {
    Mesh mesh(item.mesh(), rank.comm());
    const TrainerConfig config = trainer_config(item, case_weights(item));
    TrainerParts parts = fsdp_tp_parts(
        config, mesh, autotp_plan(*make_model(item.config, item.attention), item.degrees.tp));
    auto* const shards = dynamic_cast<FsdpShards*>(parts.data_parallel.get());
    Optimizer* const optimizer = parts.optimizer.get();
    Trainer trainer(std::move(parts), mesh, nullptr);
    trainer.setup();
    std::vector<TokenBatch> batches;
    for (const Batch& batch : batches_of(item, CaseData(item), rank.rank(), 0))
      batches.push_back(to_token_batch(batch));
    trainer.train_step(batches);
    return std::vector<double>{
        bytes_of(shards->masters()), bytes_of(shards->gradients()), bytes_of(optimizer->state()),
        static_cast<double>(shards->gathered().peak), static_cast<double>(shards->gathered().now)};
  });
}

void expect_within_a_tenth(double expected, double actual, const char* what) {
  EXPECT_NEAR(actual, expected, expected / 10) << what;
}

TEST(FsdpMemory, IsWhatTheFormulaSays) {
  Case small = with_masters(fsdp_case({.dp = 2, .tp = 2}));
  small.settings.optimizer = OptimizerSettings{};
  Case large = small;
  large.degrees.dp = 3;
  large.config.hidden_size = 192;
  large.config.intermediate_size = 640;
  large.config.num_layers = 4;
  large.config.num_heads = large.config.num_kv_heads = 6;
  large.config.head_dim = 32;

  for (const Case& item : {small, large}) {
    const Bytes expected = predicted(item);
    const auto ranks = measured(item);
    ASSERT_EQ(static_cast<int>(ranks.size()), item.degrees.dp * item.degrees.tp);
    for (const std::vector<double>& rank : ranks) {
      expect_within_a_tenth(expected.parameters, rank[0], "parameters");
      expect_within_a_tenth(expected.gradients, rank[1], "gradients");
      expect_within_a_tenth(expected.optimizer, rank[2], "optimizer");
      expect_within_a_tenth(expected.gathered, rank[3], "gathered at its peak");
      EXPECT_EQ(rank[4], 0) << "gathered after the step";
      EXPECT_LT(rank[3], expected.parameters * item.degrees.dp / 2 * 0.95)
          << "the peak must be below all parameters at once";
    }
  }
}

}  // namespace
}  // namespace isoshard
