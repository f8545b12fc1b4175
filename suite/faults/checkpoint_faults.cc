// SPDX-License-Identifier: Apache-2.0
/// Faults of runs that are saved and loaded: K: optimizer state of other owners; H: random streams
/// of other ranks.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "subjects/model/zoo/registry.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

/// Two steps, a checkpoint, and two more in a subject that loads it.
Case resumed(Case item) {
  item.steps = 4;
  item.reload_after = 2;
  return item;
}

std::string swapped(std::string name, std::string_view a, std::string_view b) {
  const std::string original = name;
  if (const std::size_t place = original.find(a); place != std::string::npos)
    return name.replace(place, a.size(), b);
  if (const std::size_t place = original.find(b); place != std::string::npos)
    return name.replace(place, b.size(), a);
  return name;
}

Fault optimizer_state_swapped_on_load() {
  Fault fault{.id = "optimizer_state_swapped_on_load",
              .fault_class = 'K',
              .subjects = {"autotp", "megatron"}};
  fault.summary = "On resume, stored optimizer state went to the wrong owner.";
  fault.source = "Megatron-LM #761";
  fault.smallest_case = [] {
    Case item = resumed(fault_case("llama", "autotp", {.dp = 3, .tp = 2}));
    item.settings.optimizer = {};
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.checkpoint_io = checkpoint_double(
        std::move(parts.checkpoint_io),
        {.read = [probe](const CheckpointIo& inner, const Checkpoint& checkpoint,
                         std::string_view name, const Layout& layout, const Mesh& mesh,
                         at::Tensor local) {
          const std::string other = swapped(std::string(name), "mlp.gate_proj", "mlp.up_proj");
          inner.read(checkpoint, name, layout, mesh, local);
          if (other == name) return;
          const at::Tensor right = local.clone();
          inner.read(checkpoint, other, layout, mesh, local);
          (void)counted(probe, right, local);
        }});
  };
  fault.expected = {
      Stage::kOptimizerState, "model.layers.0.mlp.gate_proj.weight.exp_avg", any_rank(6),
      "optimizer state after load: moments of mlp.gate_proj and mlp.up_proj are swapped", 1};
  fault.expected->diagnosis += "; parameters right";
  return fault;
}

/// Once the run was loaded, every rank stands where rank 0 stands in the stream: its masks begin at
/// rank 0's indices.
class StreamOfRank0 final : public RngStreams {
 public:
  StreamOfRank0(std::uint64_t seed, int rank, std::int64_t samples,
                std::shared_ptr<const bool> is_loaded, FaultProbe probe)
      : RngStreams(seed),
        rank_(rank),
        samples_(samples),
        is_loaded_(std::move(is_loaded)),
        probe_(std::move(probe)) {}
  at::Tensor keep_mask(const MaskPart& part) const override {
    if (!*is_loaded_ || rank_ == 0) return RngStreams::keep_mask(part);
    MaskPart first = part;
    std::fill(first.offset.begin() + 1, first.offset.end(), 0);
    first.offset.front() = part.offset.front() / samples_ * samples_;
    return counted(probe_, RngStreams::keep_mask(part), RngStreams::keep_mask(first));
  }

 private:
  int rank_;
  std::int64_t samples_;  ///< of a global micro-batch
  std::shared_ptr<const bool> is_loaded_;
  FaultProbe probe_;
};

Fault rng_of_one_rank_restored_everywhere() {
  Fault fault{
      .id = "rng_of_one_rank_restored_everywhere", .fault_class = 'H', .subjects = {"megatron"}};
  fault.summary =
      "The random state of one rank was stored for all, and every rank resumed on that stream.";
  fault.source = "Megatron-LM PR 6858";
  fault.smallest_case = [] {
    Case item = resumed(fault_case("gpt2", "megatron", {.dp = 3, .tp = 2}));
    item.settings.sequence_parallel = true;
    set_dropout(item.config, 0.1);
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh& mesh, const Case& item,
                         const FaultProbe& probe) {
    const auto is_loaded = std::make_shared<bool>(false);
    parts.streams = std::make_shared<StreamOfRank0>(
        parts.streams->seed(), mesh.rank(), item.degrees.dp * item.batch_size, is_loaded, probe);
    parts.checkpoint_io =
        checkpoint_double(std::move(parts.checkpoint_io),
                          {.progress = [is_loaded](const CheckpointIo& inner,
                                                   const Checkpoint& checkpoint, const Mesh& own) {
                            *is_loaded = true;
                            return inner.progress(checkpoint, own);
                          }});
  };
  fault.expected = {
      Stage::kMasks, "transformer.drop", any_rank(6),
      "after resume: masks of ranks 1..5 equal the mask of rank 0; right before saving", 2};
  return fault;
}

}  // namespace

void add_checkpoint_faults(Faults& faults) {
  faults.push_back(rng_of_one_rank_restored_everywhere());
  faults.push_back(optimizer_state_swapped_on_load());
}

}  // namespace isoshard
