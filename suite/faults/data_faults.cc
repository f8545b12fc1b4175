// SPDX-License-Identifier: Apache-2.0
/// Class D: which tokens are trained on; and class I: which samples a rank reads.
#include <ATen/ATen.h>

#include "suite/faults/catalogue.h"
#include "suite/record/batches.h"

namespace isoshard {
namespace {

/// Hides the first counted label of every sample.
void hide_first_answer_token(std::vector<Batch>& micro_batches, const CaseData&, const Case&, int,
                             int, const FaultProbe& probe) {
  for (Batch& batch : micro_batches) {
    at::Tensor labels = batch.tensors.at("labels").clone();
    for (std::int64_t row = 0; row < labels.size(0); ++row) {
      const at::Tensor counted = labels.select(0, row).ne(kNotCounted).nonzero();
      if (counted.numel() == 0) continue;
      labels.select(0, row).narrow(0, counted[0].item<std::int64_t>(), 1).fill_(kNotCounted);
      probe.fired();
    }
    batch.tensors.find("labels")->second = labels;
  }
}

Fault loss_mask_off_by_one() {
  Fault fault{.id = "loss_mask_off_by_one",
              .fault_class = 'D',
              .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"}};
  fault.summary =
      "The mask was built for inputs and used on labels without the shift; the first answer token "
      "was never trained.";
  fault.source = "torchtitan #2755";
  fault.smallest_case = [] {
    Case item = fault_case("qwen2", "ddp", {.dp = 3});
    item.data.prompt_length = 5;
    return item;
  };
  fault.hooks.data = hide_first_answer_token;
  fault.expected = expect(Stage::kDataIds, "labels", any_rank(3),
                          {CauseId::kFewerValidTokens, {{"num_tokens", 6}}});
  return fault;
}

Fault same_batch_on_all_dp_ranks() {
  Fault fault{.id = "same_batch_on_all_dp_ranks",
              .fault_class = 'I',
              .subjects = {"ddp", "autotp", "fsdp_tp", "megatron"}};
  fault.summary = "All data-parallel ranks read the same samples.";
  fault.source = "SVD_Xtend #75";
  fault.smallest_case = [] { return fault_case("qwen2", "ddp", {.dp = 3}); };
  fault.hooks.data = [](std::vector<Batch>& micro_batches, const CaseData& data, const Case& item,
                        int rank, int step, const FaultProbe& probe) {
    if (item.mesh().coordinate(rank, Axis::kDp) > 0) probe.fired();
    micro_batches.clear();
    for (const TokenBatch& batch : data.rank_batches(step, 0))
      micro_batches.push_back(to_batch(batch));
  };
  fault.expected =
      expect(Stage::kDataIds, "sample_ids", any_rank(3),
             {CauseId::kIdsRepeated, {{"times", 3}, {"formula", "dp"}, {"share", "2/3"}}});
  return fault;
}

}  // namespace

void add_data_faults(Faults& faults) {
  for (Fault (*make)() : {loss_mask_off_by_one, same_batch_on_all_dp_ranks})
    faults.push_back(make());
}

}  // namespace isoshard
