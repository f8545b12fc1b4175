// SPDX-License-Identifier: Apache-2.0
// What each system holds at three moments: when backward begins, when it ends, and while the
// optimizer steps.
#include "suite/bench/formulas/memory_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "core/observe/layer_name.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/optim/clip.h"
#include "subjects/parallel/megatron/fused_layers.h"
#include "subjects/parallel/megatron/megatron_plan.h"
#include "subjects/parallel/nd/schedule/schedule_check.h"
#include "subjects/parallel/nd/stages.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/registry/subject_spec.h"
#include "suite/bench/formulas/activation_model.h"

namespace isoshard {
namespace {

/// Elements of a rank's parameters.
struct Elements {
  double all = 0;
  double root = 0;           ///< in no layer: embedding, final norm, head
  double largest_layer = 0;  ///< of a layer
  double largest = 0;        ///< of a parameter
  double fused = 0;          ///< parts of fused layers
  double alone = 0;          ///< in buckets of their own
};

double wide_of(std::int64_t size) {
  return static_cast<double>(size);
}

double bytes_of_element(Dtype dtype) {
  return static_cast<double>(size_of(dtype));
}

const SubjectTraits& traits_of(const Case& c) {
  return subject_spec(c.subject).traits;
}

ShardPlan plan_of_case(const Case& c, const Model& model) {
  const bool fuses_layers = traits_of(c).fuses_layers;
  if (c.degrees.tp == 1 && !fuses_layers) return {};
  const std::int64_t multiple = c.settings.make_vocab_size_divisible_by;
  return fuses_layers ? megatron_plan(model, c.degrees.tp, multiple)
                      : autotp_plan(model, c.degrees.tp, multiple);
}

double elements_of(const ParameterSpec& spec, const ShardPlan& plan, const Case& c) {
  double elements = 1;
  for (const std::int64_t size : spec.shape) elements *= wide_of(size);
  const ShardKind kind = plan.kind_of(spec.name);
  if (is_vocab(kind)) return wide_of(plan.vocab_rows_per_rank) * wide_of(spec.shape.back());
  if (kind == ShardKind::kKvReplica) return elements / wide_of(c.config.num_kv_heads);
  return plan.sharded_dim(spec) >= 0 ? elements / c.degrees.tp : elements;
}

Elements elements_of_rank(const Case& c, const Model& model, const ShardPlan& plan,
                          const std::vector<ModelSection>& sections) {
  std::set<std::string> fused_modules;
  if (traits_of(c).fuses_layers) {
    for (const FusedLayers& group : fused_layers(model, plan))
      fused_modules.insert(group.modules.begin(), group.modules.end());
  }
  const auto element = static_cast<std::int64_t>(size_of(c.dtype));
  Elements result;
  std::map<std::string, double> layers;
  for (const ParameterSpec& spec : model.parameters()) {
    const bool is_own =
        sections.empty() || std::ranges::any_of(sections, [&](const ModelSection& section) {
          return reads(section, spec);
        });
    if (!is_own) continue;
    const double elements = elements_of(spec, plan, c);
    result.all += elements;
    result.largest = std::max(result.largest, elements);
    const std::string layer(layer_of(spec.name));
    if (layer.empty()) {
      result.root += elements;
    } else {
      layers[layer] += elements;
    }
    if (fused_modules.contains(spec.name.substr(0, spec.name.rfind('.')))) result.fused += elements;
    if (elements * wide_of(element) >= wide_of(c.settings.bucket_bytes)) result.alone += elements;
  }
  for (const auto& [name, elements] : layers)
    result.largest_layer = std::max(result.largest_layer, elements);
  return result;
}

/// Bytes that are there through the whole step, and what comes with each moment.
struct Holding {
  double parameters = 0, masters = 0;
  double buckets = 0;        ///< gradients of the step before, or buffers of them
  double sums = 0;           ///< of micro-batches; cleared before forward
  double fresh = 0;          ///< gradients as backward makes them, all of a rank's
  double root_gathered = 0;  ///< besides `parameters`, from forward to the end of backward
  double layer_gathered = 0;
  double reduced = 0;        ///< gradients as the optimizer gets them, where they are copies
  double reduce_buffer = 0;  ///< at the end of backward
  double publish = 0;        ///< after the optimizer
};

Holding holding_of(const Case& c, const Elements& own) {
  const double e = bytes_of_element(c.dtype);
  const Dtype master_dtype = c.settings.master_dtype.value_or(c.dtype);
  const double m = bytes_of_element(master_dtype);
  const bool has_masters = c.settings.master_dtype.has_value(), is_wider = m > e;
  const double states = c.settings.optimizer.kind == OptimizerSettings::Kind::kAdamW ? 2
                        : c.settings.optimizer.momentum != 0                         ? 1
                                                                                     : 0;
  const double dp = c.degrees.dp;
  Holding h;
  h.fresh = own.all * e;
  if (traits_of(c).shards_parameters) {
    const double shards = dp / c.settings.nd.dp_replicate * c.degrees.cp;
    const double r = bytes_of_element(c.settings.reduce_dtype.value_or(c.dtype));
    h.masters = own.all / shards * m * (1 + states);
    if (c.degrees.pp > 1 || c.settings.nd.stages_per_rank > 1) {
      // KeptShards: whole through the step, sums of whole gradients
      h.parameters = own.all * e;
      h.sums = own.all * r;
      h.reduced = own.all / shards * m;
      return h;
    }
    h.root_gathered = own.root * e;
    h.layer_gathered = own.largest_layer * e;
    h.reduced = own.all / shards * m;
    h.fresh = own.root * e;
    h.reduce_buffer = std::max(own.root, own.largest_layer) * r * (1 + 1 / shards);
    return h;
  }
  if (traits_of(c).buffers_gradients) {
    const double g = std::max(4.0, e);
    const bool is_distributed = c.settings.distributed_optimizer;
    h.parameters = own.all * e + own.fused * e;
    h.buckets = own.all * g;
    const double stepped = is_distributed ? own.all / dp : own.all;
    const double copied = is_distributed ? stepped : is_wider ? own.all : own.fused;
    h.masters = copied * m + stepped * states * m;
    h.reduced = (is_distributed ? own.all / dp : own.fused) * g;
    // a bucket's own part, and what is gathered of all
    const double bucket =
        std::min(own.all, std::max(own.largest, wide_of(c.settings.bucket_bytes) / g)) * e;
    h.publish = is_distributed ? (1 + 1 / dp) * bucket : 0;
    return h;
  }
  h.parameters = own.all * e;
  const double sum = bytes_of_element(c.settings.accumulate_dtype.value_or(c.dtype));
  if (c.settings.accumulate_dtype.has_value()) h.sums = own.all * sum;
  if (c.settings.zero_stage > 0) {
    h.masters = own.all / dp * m * (1 + states);
    h.reduced = is_wider ? own.all / dp * m : 0;
    h.publish = own.all * e * (1 + 1 / dp);
    if (c.settings.zero_stage == 1) {
      h.buckets = own.all * e;
    } else {
      const double bucket =
          std::max(own.largest * e, std::min(own.all * e, wide_of(c.settings.bucket_bytes)));
      h.sums = own.all / dp * sum;
      h.fresh = bucket;
      h.reduce_buffer = bucket * (1 + 1 / dp);
    }
    return h;
  }
  h.masters = own.all * m * (states + (has_masters ? 1 : 0));
  h.reduced = is_wider ? own.all * m : 0;
  h.buckets = is_reference(c.subject) ? 0 : own.all * e;
  return h;
}

RankMemory memory_of(const Case& c, const Elements& own, const std::vector<ModelSection>& sections,
                     int in_flight) {
  const double m = bytes_of_element(c.settings.master_dtype.value_or(c.dtype));
  const Holding h = holding_of(c, own);
  const ActivationBytes a = activation_bytes(c, sections, in_flight);
  RankMemory result;
  result.parameters = h.parameters + h.root_gathered;
  result.masters = h.masters;
  result.activations = a.kept;
  result.logits = a.logits;
  const bool is_gathered = h.layer_gathered > 0;
  // gradients that earlier micro-batches have added up
  const bool sums_apart = h.sums > 0;
  const double earlier = c.micro_batches == 1 ? 0
                         : sums_apart         ? h.sums
                         : is_gathered        ? h.reduced
                                              : h.fresh;
  result.gradients = h.buckets + h.sums + h.fresh + (is_gathered ? h.reduced : 0);
  const double always = h.parameters + h.masters;
  const double forward = always + h.buckets + earlier + h.root_gathered + a.kept;
  const double begin = forward + a.logits + std::max(a.head_gradients, a.loss_blocks);
  const double layer = forward + 2 * h.layer_gathered + a.head_weight_gradient + a.layer_backward;
  // Gradients of a tied weight are added up before they are reduced, and what was gathered is let
  // go between the two. Reduced by then are those of layers.
  const double of_layers = own.all > 0 ? 1 - own.root / own.all : 0;
  const double last = always + h.buckets + h.sums + h.fresh + a.last_layer,
               reduced = is_gathered ? h.reduced : 0;
  const double summing = last + of_layers * reduced + h.root_gathered + a.tied_gradients,
               reducing = last + reduced + h.reduce_buffer;
  const double end = std::max(summing, reducing);
  const double kept_gradients = is_reference(c.subject) ? h.fresh : h.buckets + h.sums;
  // AdamW's denominator, and before that squares in fp64 for the norm
  const double denominator = 2 * own.largest * m,
               squares = 2 * 8 * std::min(own.largest, wide_of(kNormBlockElements));
  const double optimizer =
      always + kept_gradients + h.reduced + std::max({denominator, squares, h.publish});
  result.peak = std::max({begin, layer, end, optimizer});
  result.moment = result.peak == begin || result.peak == layer ? "the begin of backward"
                  : result.peak == end                         ? "the end of backward"
                                                               : "the optimizer";
  return result;
}

}  // namespace

std::vector<RankMemory> predicted_memory(const Case& c) {
  const auto model = make_model(c.config, c.attention);
  const ShardPlan plan = plan_of_case(c, *model);
  const NdSettings& nd = c.settings.nd;
  if (c.degrees.pp == 1 && nd.stages_per_rank == 1)
    return {memory_of(c, elements_of_rank(c, *model, plan, {}), {}, 1)};
  const PipelineSpec spec = pipeline_spec(nd, c.degrees.pp, c.micro_batches);
  const std::vector<ModelSection> stages =
      stages_of(c.config.num_layers, num_stages(spec), nd.layers_per_stage);
  const std::vector<int> in_flight = peak_activations(make_schedule(spec));
  std::vector<RankMemory> ranks;
  for (int rank = 0; rank < c.degrees.pp; ++rank) {
    std::vector<ModelSection> sections;
    for (const int stage : stages_of_rank(spec, rank))
      sections.push_back(stages[static_cast<std::size_t>(stage)]);
    ranks.push_back(memory_of(c, elements_of_rank(c, *model, plan, sections), sections,
                              in_flight[static_cast<std::size_t>(rank)]));
  }
  return ranks;
}

RankMemory largest_of(const std::vector<RankMemory>& ranks) {
  return *std::ranges::max_element(ranks, {}, &RankMemory::peak);
}

double predicted_bytes_of_world(const Case& c) {
  double sum = 0;
  for (const RankMemory& rank : predicted_memory(c)) sum += rank.peak;
  const double a_stage = is_reference(c.subject) ? 1 : c.degrees.num_ranks() / c.degrees.pp;
  return sum * a_stage;
}

}  // namespace isoshard
