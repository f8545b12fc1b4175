// SPDX-License-Identifier: Apache-2.0
/// Faults of class H: what should be repeated while layers are computed again, and is not.
#include <ATen/ATen.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/observe/layer_name.h"
#include "subjects/model/ops/autocast.h"
#include "subjects/model/zoo/registry.h"
#include "suite/faults/catalogue.h"
#include "suite/faults/test_doubles.h"

namespace isoshard {
namespace {

/// A stream whose state nobody put back before the second pass.
class NotRestored final : public RngStreams {
 public:
  NotRestored(std::uint64_t seed, FaultProbe probe) : RngStreams(seed), probe_(std::move(probe)) {}
  at::Tensor keep_mask(const MaskPart& part) const override {
    if (!part.is_recomputed) return RngStreams::keep_mask(part);
    return counted(probe_, RngStreams::keep_mask(part), RngStreams(seed() + 1).keep_mask(part));
  }

 private:
  FaultProbe probe_;
};

Fault recompute_draws_new_mask() {
  Fault fault{.id = "recompute_draws_new_mask",
              .fault_class = 'H',
              .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"}};
  fault.summary =
      "Recomputed layers drew fresh dropout masks, so gradients belonged to another sample than "
      "the loss.";
  fault.source = "OLMo-core PR 828; pytorch #190717";
  fault.smallest_case = [] {
    Case item = fault_case("gpt2", "ddp", {.dp = 2});
    set_dropout(item.config, 0.1);
    item.settings.recompute_every = 1;
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.streams = std::make_shared<NotRestored>(parts.streams->seed(), probe);
  };
  fault.expected = {Stage::kMasks,
                    "transformer.h.0.attn.attn_dropout.recomputed",
                    any_rank(2),
                    {CauseId::kRecomputedMaskDiffers}};
  return fault;
}

Fault recompute_in_default_dtype() {
  Fault fault{.id = "recompute_in_default_dtype",
              .fault_class = 'H',
              .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"}};
  fault.summary =
      "Recomputed layers entered autocast without the forward pass's dtype and ran in fp16 instead "
      "of bf16.";
  fault.source = "fairscale #1199";
  fault.smallest_case = [] {
    Case item = fault_case("llama", "ddp", {.dp = 2});
    item.settings.autocast = Dtype::kBFloat16;
    item.settings.recompute_every = 1;
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case& item, const FaultProbe& probe) {
    // a layer's modules are called in the forward pass, and then in the repeated one
    const auto calls = std::make_shared<std::map<std::string, int, std::less<>>>();
    StrategyRules rules;
    rules.linear =
        [calls, is_here = item.settings.recompute_every > 0 && item.settings.autocast.has_value(),
         probe](const Strategy& inner, std::string_view module, const at::Tensor& x,
                const at::Tensor& weight, const std::optional<at::Tensor>& bias, Sink* sink) {
          const bool is_second =
              is_here && !within_layer(module).empty() && ++(*calls)[std::string(module)] % 2 == 0;
          if (!is_second) return inner.linear(module, x, weight, bias, sink);
          probe.fired();
          const AutocastScope autocast(x.device().type(), at::kHalf);
          return inner.linear(module, x, weight, bias, sink).to(at::kBFloat16);
        };
    parts.strategy = strategy_double(std::move(parts.strategy), std::move(rules));
  };
  fault.expected = {Stage::kForward,
                    "model.layers.1.self_attn.q_proj.recomputed",
                    any_rank(2),
                    {CauseId::kRecomputedActivationsDiffer}};
  return fault;
}

/// Tokens of a rank's part of the sequence draw the bits of the first part, as a stream does that
/// does not know of the split.
class OneStreamForAll final : public RngStreams {
 public:
  OneStreamForAll(std::uint64_t seed, FaultProbe probe)
      : RngStreams(seed), probe_(std::move(probe)) {}
  at::Tensor keep_mask(const MaskPart& part) const override {
    const bool is_in_layer = part.site.find(".h.") != std::string_view::npos ||
                             part.site.find(".layers.") != std::string_view::npos;
    if (!is_in_layer || part.size.size() != 3 || part.size[1] == part.global_shape[1] ||
        part.offset[1] == 0)
      return RngStreams::keep_mask(part);
    MaskPart first = part;
    first.offset[1] = 0;
    return counted(probe_, RngStreams::keep_mask(part), RngStreams::keep_mask(first));
  }

 private:
  FaultProbe probe_;
};

Fault sp_dropout_stream_lost() {
  Fault fault{.id = "sp_dropout_stream_lost", .fault_class = 'H', .subjects = {"megatron"}};
  fault.summary =
      "One wrong word dropped the random-stream context; sequence shards then drew the same mask.";
  fault.source = "Megatron-LM #1256, PR 972";
  fault.smallest_case = [] {
    Case item = fault_case("gpt2", "megatron", {.dp = 3, .tp = 2});
    item.settings.sequence_parallel = true;
    set_dropout(item.config, 0.1);
    return item;
  };
  fault.hooks.parts = [](TrainerParts& parts, Mesh&, const Case&, const FaultProbe& probe) {
    parts.streams = std::make_shared<OneStreamForAll>(parts.streams->seed(), probe);
  };
  fault.expected = {Stage::kMasks,
                    "transformer.h.0.attn.resid_dropout",
                    any_rank(6),
                    {CauseId::kOneMaskForTokens, {{"axis", "tp"}, {"ranks", std::vector{0, 1}}}}};
  return fault;
}

}  // namespace

void add_random_faults(Faults& faults) {
  faults.push_back(recompute_draws_new_mask());
  faults.push_back(recompute_in_default_dtype());
  faults.push_back(sp_dropout_stream_lost());
}

}  // namespace isoshard
