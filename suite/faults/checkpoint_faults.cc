// SPDX-License-Identifier: Apache-2.0
/// Faults of runs that are saved and loaded: K: optimizer state of other owners; H: random streams
/// of other ranks or seeds; I: samplers that stand elsewhere.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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
  fault.expected =
      expect(Stage::kOptimizerState, "model.layers.0.mlp.gate_proj.weight.exp_avg", any_rank(6),
             {CauseId::kOptimizerStatesSwapped,
              {{"state", "moments"},
               {"module", "mlp.gate_proj"},
               {"other", "mlp.up_proj"},
               {"parameters_are_right", 1}}},
             1);
  return fault;
}

/// Where a resumed run stands is read right, and then edited.
std::unique_ptr<CheckpointIo> editing_progress(std::unique_ptr<CheckpointIo> inner,
                                               std::function<void(RunProgress&)> edit) {
  return checkpoint_double(
      std::move(inner),
      {.progress = [edit = std::move(edit)](const CheckpointIo& io, const Checkpoint& checkpoint,
                                            const Mesh& own) {
        RunProgress progress = io.progress(checkpoint, own);
        edit(progress);
        return progress;
      }});
}

Fault optimizer_steps_reset_on_load() {
  Fault fault{.id = "optimizer_steps_reset_on_load",
              .fault_class = 'K',
              .subjects = {"ddp", "autotp", "megatron"}};
  fault.summary =
      "The loader copied the fresh optimizer's count of steps over the stored one; Adam's bias "
      "correction began again at every resume.";
  fault.source = "Megatron-LM PR 2874 (radixark/Megatron-LM PR 69)";
  fault.smallest_case = [] {
    Case item = resumed(fault_case("llama", "ddp", {.dp = 3}));
    item.settings.optimizer = {};
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.checkpoint_io =
        editing_progress(std::move(parts.checkpoint_io), [probe](RunProgress& progress) {
          for (auto& [parameter, count] : progress.updates) {
            if (count != 1) probe.fired();
            count = 1;
          }
        });
  };
  fault.expected =
      expect(Stage::kProgress, "optimizer_steps", any_rank(3),
             {CauseId::kUpdatesMiscounted,
              {{"counted", 1}, {"made", 2}, {"after_resume", 1}, {"was_right_before", 1}}},
             1);
  return fault;
}

Fault rng_state_not_loaded() {
  Fault fault{.id = "rng_state_not_loaded",
              .fault_class = 'H',
              .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"}};
  fault.summary = "The random state was saved and not loaded; a resumed run drew other numbers.";
  fault.source = "transformers #17032; ms-swift PR 9935";
  fault.smallest_case = [] { return resumed(fault_case("qwen2", "ddp", {.dp = 2})); };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.checkpoint_io =
        editing_progress(std::move(parts.checkpoint_io), [probe](RunProgress& progress) {
          ++progress.stream.seed;  // a new process has a seed of its own
          probe.fired();
        });
  };
  fault.expected =
      expect(Stage::kProgress, "rng_state", any_rank(2),
             {CauseId::kOtherMaskSeed, {{"after_resume", 1}, {"was_right_before", 1}}}, 1);
  return fault;
}

Fault sampler_saved_ahead() {
  Fault fault{.id = "sampler_saved_ahead",
              .fault_class = 'I',
              .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"}};
  fault.summary =
      "The saved sampler counted batches that workers had fetched ahead; a resumed run left them "
      "out.";
  fault.source = "lhotse PR 417, #785";
  fault.smallest_case = [] { return resumed(fault_case("qwen2", "ddp", {.dp = 3})); };
  fault.hooks.sampler = [](const Sampler& inner, const Case& item, std::int64_t global_batch,
                           int dp_coordinate, const FaultProbe& probe) {
    const std::int64_t saved = std::int64_t{item.reload_after} * item.micro_batches;
    std::vector<std::int64_t> right = inner.samples(global_batch, dp_coordinate);
    if (item.reload_after == 0 || global_batch < saved) return right;
    std::vector<std::int64_t> wrong =
        inner.samples(global_batch + item.micro_batches, dp_coordinate);
    if (wrong != right) probe.fired();
    return wrong;
  };
  fault.expected = expect(Stage::kProgress, "next_sample_ids", any_rank(3),
                          {CauseId::kSamplerAhead, {{"steps", 1}}}, 1);
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
  fault.expected =
      expect(Stage::kMasks, "transformer.drop", any_rank(6),
             {CauseId::kMasksOfOtherRank,
              {{"ranks", std::vector{1, 2, 3, 4, 5}}, {"owner_rank", 0}, {"was_right_before", 1}}},
             2);
  return fault;
}

}  // namespace

void add_checkpoint_faults(Faults& faults) {
  for (Fault (*make)() :
       {rng_of_one_rank_restored_everywhere, optimizer_state_swapped_on_load,
        optimizer_steps_reset_on_load, rng_state_not_loaded, sampler_saved_ahead}) {
    faults.push_back(make());
  }
}

}  // namespace isoshard
