// SPDX-License-Identifier: Apache-2.0
/// Cases that the suites of nd share.
#pragma once
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "suite/testing/step_cases.h"

namespace isoshard {

/// 24 tokens a sample, which head-and-tail order cuts over cp 2, 3 and 4.
inline Case nd_case(const Degrees& degrees, Dtype dtype = Dtype::kFloat32,
                    std::string_view model_type = "qwen2") {
  Case item = step_case("nd", degrees, dtype, model_type);
  item.seq_length = 24;
  return item;
}

inline Case with_layers(Case item, std::int64_t layers) {
  item.config.num_layers = layers;
  item.model_name += "_" + std::to_string(layers) + "_layers";
  return item;
}

/// One layer a stage; at least four micro-batches, with unequal numbers of labels.
inline Case in_pipeline(Case item, int stages_per_rank = 1, std::string_view schedule = "1F1B") {
  item.settings.nd.pipeline_schedule = schedule;
  item.settings.nd.stages_per_rank = stages_per_rank;
  item.micro_batches = std::max(4, item.degrees.pp * stages_per_rank);
  item.data.unequal_labels = true;
  return with_layers(std::move(item), item.degrees.pp * stages_per_rank);
}

inline Case in_ring(Case item) {
  item.settings.nd.context_attention = ContextAttention::kRing;
  return item;
}

/// The sequence split over tp between regions, and with it the vocabulary.
inline Case in_sequence(Case item) {
  item.settings.sequence_parallel = true;
  item.settings.make_vocab_size_divisible_by = 1;
  return item;
}

/// Layers 1, 3, ... run again in backward.
inline Case recomputing_every_second(Case item) {
  item.settings.recompute_every = 2;
  return item;
}

inline Case with_replicas(Case item, int replicas) {
  item.settings.nd.dp_replicate = replicas;
  return item;
}

}  // namespace isoshard
