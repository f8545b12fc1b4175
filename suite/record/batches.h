// SPDX-License-Identifier: Apache-2.0
/// Batches of a case in the harness's form, and back.
#pragma once
#include <vector>

#include "fixtures/inputs/inputs.h"
#include "harness/world/batch.h"
#include "subjects/data/tokens.h"

namespace isoshard {

[[nodiscard]] Batch to_batch(const TokenBatch& tokens);
/// Errors   ShapeError if "input_ids" or "labels" is missing or does not fit the sample ids.
[[nodiscard]] TokenBatch to_token_batch(const Batch& batch);

/// What world rank `rank` of a case trains on in one step, by micro-batch: its own samples only;
/// all samples for the reference.
[[nodiscard]] std::vector<Batch> batches_of(const Case& item, const CaseData& data, int rank,
                                            int step);

}  // namespace isoshard
