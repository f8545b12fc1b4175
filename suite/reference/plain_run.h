// SPDX-License-Identifier: Apache-2.0
/// The unsharded process, and legal variants of it: what they differ by is no error.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "fixtures/cases/case.h"
#include "fixtures/cases/resumed_case.h"
#include "fixtures/inputs/inputs.h"
#include "harness/run/record.h"
#include "harness/world/rank.h"
#include "subjects/train/trainer.h"

namespace isoshard {

/// How an unsharded run goes: its weights and batches; what is changed about trainer and records.
/// Refers to the case and its data.
struct PlainRun {
  std::shared_ptr<const WeightSource> weights;
  std::function<std::vector<TokenBatch>(int step)> batches;
  std::function<void(TrainerParts&)> edit = {};  ///< empty: nothing
  /// Between trainer and recorder; empty: nothing.
  std::function<std::unique_ptr<Sink>(Sink& recorder)> between = {};
};

/// The global batch in one forward (one for each micro-batch).
[[nodiscard]] PlainRun whole_batch_run(const CaseData& data,
                                       std::shared_ptr<const WeightSource> weights);

/// What dp ranks do, one after the other: the same samples in one forward for each rank and
/// micro-batch, with the loss times dp, gradients added up and divided by dp where they are used.
/// Everything is recorded but data and masks: activations as those of the whole micro-batch,
/// gradients and losses with that factor as their grad_scale. After a step, activations show how
/// far such gradients move the forward pass.
///
/// How a long sum rounds depends on how many tokens one call has: where the addends cancel (biases)
/// by much of the result. Some kernels add in the tensor's own dtype (embedding, LayerNorm): in 16
/// bits, sums of hundreds of tokens lose what is small. And what every token's loss is multiplied
/// with rounds alike in all of them, by the factor.
[[nodiscard]] PlainRun regrouped_run(const Case& c, const CaseData& data,
                                     std::shared_ptr<const WeightSource> weights);

/// The global batch in one forward with the loss times dp. Recorded as before.
///
/// In fp16 small gradients are subnormal or lost, and how many depends on the factor. In every
/// dtype a factor that is no power of two rounds, and rounds alike in all tokens; with label
/// smoothing the sum of a token's gradients over the vocabulary, which each of them is multiplied
/// with, does.
[[nodiscard]] PlainRun scaled_run(const Case& c, const CaseData& data,
                                  std::shared_ptr<const WeightSource> weights);

/// Whether a loss times dp rounds differently: it does if dp is not a power of two, and in fp16.
[[nodiscard]] bool factor_shows(const Case& c);

/// The global batch in one forward, whose products are computed in pieces of the shapes that ranks
/// have (EqualPieces). A norm in the dtype of gradients (ClipNorm::kTorch) is one of pieces, too,
/// as many as dp ranks: a sum of squares in one accumulator loses the more, the longer it is.
[[nodiscard]] PlainRun pieces_run(const Case& c, const CaseData& data,
                                  std::shared_ptr<const WeightSource> weights);

/// A mesh of one.
[[nodiscard]] const MeshShape& world_of_one();

/// The run as record() takes it: one rank that trains c.steps steps. Refers to the case, and has a
/// copy of `run`. A case that is reloaded is not interrupted here: what its subject loads must be
/// what this run has, so the state is recorded once more where it would be loaded.
[[nodiscard]] RunSpec plain_spec(const Case& c, PlainRun run);

}  // namespace isoshard
