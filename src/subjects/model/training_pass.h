// SPDX-License-Identifier: Apache-2.0
/// What the forward pass of a training step needs beyond that of an evaluation.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>

#include "core/mesh/mesh.h"
#include "subjects/model/ops/rng_streams.h"

namespace isoshard {

/// The part of a model that one call of its forward runs: all of it, or a stage of a pipeline.
struct ModelSection {
  std::int64_t first_layer = 0;
  std::int64_t end_layer = std::numeric_limits<std::int64_t>::max();  ///< the first layer after it
  /// Its input are token ids; otherwise what the section before it returns.
  bool has_embedding = true;
  /// It returns logits; otherwise what the section after it takes: [B,S,H], of a model whose layers
  /// read more than the stream (lattice) all of that along the last dim.
  bool has_head = true;
  friend bool operator==(const ModelSection&, const ModelSection&) = default;
};

/// The class itself, without values, is an evaluation: nothing is dropped, nothing recomputed.
///
/// Requires   `streams` outlives the backward pass.
struct TrainingPass {
  const RngStreams* streams = nullptr;  ///< nullptr: no dropout
  int step = 0;
  /// Place in the step's global batch of this micro-batch's first sample, over all dp ranks.
  std::int64_t first_sample = 0;
  MeshShape mesh;  ///< with `rank`: where the layouts of activations lie
  int rank = 0;
  /// Activation checkpointing: the forward of every n-th layer keeps its input only and is repeated
  /// in backward. 0: of none.
  int recompute_every = 0;
  ModelSection section;
  /// int64 [B,S]: the positions of the tokens that forward gets, of documents packed into samples.
  /// Undefined: those of Strategy::token_positions.
  at::Tensor position_ids_BS = {};
};

/// Whether backward runs a layer again: with `every` n, of layers 0, 1, ... those before each
/// multiple of n (2: layers 1, 3, ...).   Source   torchtitan, selective_ac_option = "n".
[[nodiscard]] constexpr bool is_recomputed(std::int64_t layer, int every) noexcept {
  return every > 0 && (layer + 1) % every == 0;
}

}  // namespace isoshard
