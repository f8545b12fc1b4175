// SPDX-License-Identifier: Apache-2.0
/// The floating-point operations of a training step, by formula.
///
/// Terms. A multiplication and an addition are two operations. Model: what the model asks for,
/// forward and twice that for backward, with whole (not causal) attention, however it is computed.
/// Hardware: besides, what activation checkpointing computes again.
/// Source   Chowdhery et al., PaLM (2022), appendix B.
#pragma once
#include "fixtures/cases/case.h"

namespace isoshard {

struct StepFlops {
  double model = 0, hardware = 0;
};

/// Of one step of the global batch, over all ranks. Matrix products and attention only: what
/// norms, rotations, the loss and the optimizer add is below a per cent.
[[nodiscard]] StepFlops step_flops(const Case& c);

/// Tokens of one step of the global batch: dp x micro-batches x batch size x sequence.
[[nodiscard]] double tokens_per_step(const Case& c);
[[nodiscard]] double samples_per_step(const Case& c);

}  // namespace isoshard
