// SPDX-License-Identifier: Apache-2.0
/// Where a sampler stands after a step: the samples that it gives next.
#pragma once
#include <span>

#include "core/observe/sink.h"
#include "subjects/data/tokens.h"

namespace isoshard {

/// Records the samples of the step to come, by micro-batch, as data ids "next_sample_ids" of the
/// step that the sink is in.
///
/// Shapes   each micro-batch [samples]; `dp_degree` ranks hold one such part each.
void record_next_samples(Sink& sink, std::span<const TokenBatch> micro_batches, int dp_degree);

}  // namespace isoshard
