// SPDX-License-Identifier: Apache-2.0
// A stage keeps for its backward what docs/reference/subjects.md predicts.
#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "harness/testing/run_world.h"
#include "subjects/parallel/nd/stages.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/train/parts.h"
#include "suite/record/batches.h"
#include "suite/testing/nd_cases.h"
#include "suite/testing/watched_stages.h"

namespace isoshard {
namespace {

/// Counts the bytes of tensors that live.
class LiveBytes final : public c10::Allocator {
 public:
  LiveBytes() : inner_(c10::GetCPUAllocator()) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* const block = new Block{inner_->allocate(bytes), bytes, this};
    now_ += static_cast<double>(bytes);
    return {block->data.get(), block, &LiveBytes::release, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  [[nodiscard]] double now() const noexcept { return now_; }

 private:
  struct Block {
    c10::DataPtr data;
    std::size_t bytes;
    LiveBytes* owner;
  };
  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->owner->now_ -= static_cast<double>(block->bytes);
  }
  c10::Allocator* inner_;
  double now_ = 0;
};

double elements(const ModelSection& section, const std::vector<ParameterSpec>& specs) {
  double count = 0;
  for (const ParameterSpec& spec : specs)
    if (reads(section, spec)) count += static_cast<double>(numel_of(spec.shape));
  return count;
}

PipelineSpec spec_of(const Case& item) {
  return pipeline_spec(item.settings.nd, item.degrees.pp, item.micro_batches);
}

// Elements that one micro-batch leaves in a stage: the formula of docs/reference/subjects.md.
double kept(const Case& item, const ModelSection& section) {
  const ModelConfig& config = item.config;
  const auto number = [](std::int64_t value) { return static_cast<double>(value); };
  const double sequence = number(item.seq_length), cp = number(item.degrees.cp);
  const double tokens = number(item.batch_size) * sequence / cp;
  const double hidden = number(config.hidden_size), ffn = number(config.intermediate_size);
  const double heads = number(config.num_heads), dim = number(config.head_dim);
  const double kv = number(config.num_kv_heads) * dim;
  const bool is_ring = cp > 1 && item.settings.nd.context_attention == ContextAttention::kRing;
  const double all_keys = 2 * heads * dim * cp + heads * sequence;
  const double keys = is_ring ? 2 * kv + heads * (dim + 1) : all_keys;
  const double layer = 6 * hidden + 2 * heads * dim + keys + 4 * ffn + 2;
  const double layers = number(section.end_layer - section.first_layer);
  const double end = section.has_head ? 3 * hidden + number(config.vocab_size) : hidden;
  return tokens * (layers * layer + end) + 2 * sequence / cp * dim;
}

/// By rank: the most that forwards find alive of this step.
std::vector<double> predicted(const Case& item) {
  const PipelineSpec spec = spec_of(item);
  const std::vector<ModelSection> stages =
      stages_of(item.config.num_layers, num_stages(spec), item.settings.nd.layers_per_stage);
  const auto specs = make_model(item.config, item.attention)->parameters();
  std::vector<double> ranks;
  for (const auto& row : make_schedule(spec).table) {
    double alive = 0, most = 0;
    std::vector<bool> has_gradients(stages.size(), false);
    for (const auto& action : row) {
      if (!action) continue;
      const auto stage = static_cast<std::size_t>(action->stage);
      const double own = elements(stages[stage], specs);
      if (action->kind == ActionKind::kForward) {
        alive += kept(item, stages[stage]);
        most = std::max(most, alive);
      } else {
        alive -= kept(item, stages[stage]);
        if (!has_gradients[stage]) alive += own;
        has_gradients[stage] = true;
      }
    }
    ranks.push_back(most * static_cast<double>(size_of(item.dtype)));
  }
  return ranks;
}

// Of rank r of pp: from the first forward on, so without the parameters.
std::vector<double> measured(const Case& item) {
  return run_world(item.world_size(), [item](Rank& rank) {
    static LiveBytes live;
    c10::SetCPUAllocator(&live, /*priority=*/2);
    Mesh mesh(item.mesh(), rank.comm());
    const TrainerConfig config = trainer_config(item, case_weights(item));
    const auto model = make_model(item.config, item.attention);
    TrainerParts parts = nd_parts(config, mesh, autotp_plan(*model, 1, 0));
    double begin = -1, most = 0;
    DataParallel* const parameters = parts.data_parallel.get();
    parts.stages = std::make_unique<WatchedStages>(
        std::move(parts.stages), stages_of_rank(spec_of(item), mesh.coordinate(Axis::kPp)),
        [&](const PipelineAction& action, const WatchedStages::Act& act) {
          if (begin < 0) {
            (void)parameters->before_forward();
            begin = live.now();
          }
          at::Tensor result = act();
          if (action.kind == ActionKind::kForward) most = std::max(most, live.now() - begin);
          return result;
        });
    Trainer trainer(std::move(parts), mesh, nullptr);
    trainer.setup();
    trainer.forward_backward(CaseData(item).rank_batches(mesh.coordinate(Axis::kDp), 0));
    return most;
  });
}

Case sized(Case item, std::int64_t hidden, std::int64_t layers_a_stage, std::int64_t length) {
  const PipelineSpec spec = spec_of(item);
  item.config.hidden_size = hidden;
  item.config.intermediate_size = 3 * hidden;
  item.config.num_heads = 4;
  item.config.num_kv_heads = 2;
  item.config.head_dim = hidden / 4;
  item.config.max_positions = 1024;
  item.seq_length = length;
  return with_layers(std::move(item), layers_a_stage * num_stages(spec));
}

class NdMemory : public ::testing::TestWithParam<Case> {};

TEST_P(NdMemory, IsWhatTheFormulaSays) {
  for (const Case& item : {sized(GetParam(), 64, 2, 96), sized(GetParam(), 128, 4, 192)}) {
    SCOPED_TRACE(item.slug());
    const std::vector<double> expected = predicted(item), actual = measured(item);

    ASSERT_EQ(static_cast<int>(actual.size()), item.world_size());
    for (int rank = 0; rank < item.world_size(); ++rank) {
      const int stage_rank = item.mesh().coordinate(rank, Axis::kPp);
      const double wanted = expected[static_cast<std::size_t>(stage_rank)];
      EXPECT_NEAR(actual[static_cast<std::size_t>(rank)], wanted, wanted / 10) << "rank " << rank;
    }
  }
}

// The formula tells schedules apart: what GPipe keeps is not what 1F1B does.
TEST(NdMemoryFormula, TellsSchedulesAndRingsApart) {
  Case item = sized(in_pipeline(nd_case({.pp = 2})), 64, 2, 96);
  item.micro_batches = 8;
  const std::vector<double> usual = predicted(item);
  Case all = item;
  all.settings.nd.pipeline_schedule = "GPipe";
  EXPECT_GT(predicted(all)[0], 3 * usual[0]);
  EXPECT_GT(usual[0], 1.5 * usual[1]) << "the first stage keeps two micro-batches, the last one";
  Case split = item, ring = item;
  split.degrees.cp = ring.degrees.cp = 2;
  ring = in_ring(ring);
  EXPECT_LT(predicted(ring)[0], 0.8 * predicted(split)[0]) << "a ring keeps no scores";
}

std::vector<Case> memory_cases() {
  std::vector<Case> result = {
      in_pipeline(nd_case({.pp = 2})), in_pipeline(nd_case({.pp = 2}), 2, "Interleaved1F1B"),
      in_pipeline(nd_case({.pp = 2}), 1, "GPipe"),
      in_ring(in_pipeline(nd_case({.pp = 2, .cp = 2}))), in_pipeline(nd_case({.pp = 2, .cp = 2}))};
  for (Case& item : result) item.micro_batches = 8;
  return result;
}
INSTANTIATE_TEST_SUITE_P(Cases, NdMemory, ::testing::ValuesIn(memory_cases()), case_name);

}  // namespace
}  // namespace isoshard
