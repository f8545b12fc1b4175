// SPDX-License-Identifier: Apache-2.0
/// Activation checkpointing: the activations of a layer are discarded in forward and computed again
/// when backward reaches the layer.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "subjects/model/zoo/blocks.h"

namespace isoshard {

/// layer(pass, inputs), of which only the inputs are kept. Backward calls it once more with copies
/// of the inputs that require grad, under the autocast of the first call, and continues through its
/// result; parameters get their gradients there.
///
/// Guarantees   value and gradients have the bits that they have without, as each op runs on the
///              same numbers in the same order; only gradients of an input that several layers read
///              are added layer by layer. The sink of the pass sees every activation of the second
///              call as recomputed, and gradients of activations once.
/// Ranks        what the layer's forward sends is sent a second time, during backward, by every
///              rank alike.
/// Source       torch.utils.checkpoint (use_reentrant=True), Chen et al., "Training Deep Nets with
///              Sublinear Memory Cost", 2016.
[[nodiscard]] at::Tensor recomputed(const ForwardPass& pass, std::vector<at::Tensor> inputs,
                                    ForwardPass::Layer layer);

}  // namespace isoshard
