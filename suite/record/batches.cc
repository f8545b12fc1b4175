// SPDX-License-Identifier: Apache-2.0
// Conversions of batches.
#include "suite/record/batches.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "core/base/error.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

constexpr const char* kPositions = "position_ids";

at::Tensor ids_of(const Batch& batch, std::string_view name) {
  const auto found = batch.tensors.find(name);
  if (found == batch.tensors.end())
    throw ShapeError(fmt::format("a batch needs a tensor '{}' and has none", name));
  const at::Tensor& ids = found->second;
  if (ids.dim() != 2 || ids.scalar_type() != at::kLong ||
      ids.size(0) != static_cast<std::int64_t>(batch.sample_ids.size())) {
    throw ShapeError(fmt::format(
        "'{}' of a batch must be int64 [B,S] with B = {} sample ids; it has {} dims and {} rows",
        name, batch.sample_ids.size(), ids.dim(), ids.dim() > 0 ? ids.size(0) : 0));
  }
  return ids;
}

}  // namespace

Batch to_batch(const TokenBatch& tokens) {
  Batch batch{{{"input_ids", tokens.input_ids_BS}, {"labels", tokens.labels_BS}},
              tokens.sample_ids};
  if (tokens.position_ids_BS.defined()) batch.tensors.emplace(kPositions, tokens.position_ids_BS);
  return batch;
}

TokenBatch to_token_batch(const Batch& batch) {
  TokenBatch tokens;
  tokens.input_ids_BS = ids_of(batch, "input_ids");
  tokens.labels_BS = ids_of(batch, "labels");
  if (batch.tensors.contains(kPositions)) tokens.position_ids_BS = ids_of(batch, kPositions);
  tokens.sample_ids = batch.sample_ids;
  return tokens;
}

std::vector<Batch> batches_of(const Case& item, const CaseData& data, int rank, int step) {
  const bool whole = is_reference(item.subject);
  std::vector<Batch> batches;
  for (const TokenBatch& tokens :
       whole ? data.global_batches(step)
             : data.rank_batches(step, item.mesh().coordinate(rank, Axis::kDp))) {
    batches.push_back(to_batch(tokens));
  }
  return batches;
}

}  // namespace isoshard
