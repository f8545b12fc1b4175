// SPDX-License-Identifier: Apache-2.0
// One record a micro-batch.
#include "suite/reference/next_samples.h"

#include <ATen/ATen.h>

#include <utility>

namespace isoshard {

void record_next_samples(Sink& sink, std::span<const TokenBatch> micro_batches, int dp_degree) {
  for (const TokenBatch& batch : micro_batches) {
    const at::Tensor ids = at::tensor(batch.sample_ids, at::kLong);
    Layout layout = replicated(ids.sizes().vec());
    if (dp_degree > 1) {
      layout.global_shape[0] *= dp_degree;
      layout.placements.push_back(shard(Axis::kDp, 0));
    }
    sink.on_record({RecordKind::kDataId, "next_sample_ids", std::move(layout), 1.0}, ids);
  }
}

}  // namespace isoshard
