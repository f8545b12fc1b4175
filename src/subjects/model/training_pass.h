// SPDX-License-Identifier: Apache-2.0
/// What the forward pass of a training step needs beyond that of an evaluation.
#pragma once
#include <cstdint>

#include "core/mesh/mesh.h"
#include "subjects/model/ops/rng_streams.h"

namespace isoshard {

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
  /// Activation checkpointing: a layer's forward keeps its input only and is repeated in backward.
  bool recompute = false;
};

}  // namespace isoshard
