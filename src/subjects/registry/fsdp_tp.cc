// SPDX-License-Identifier: Apache-2.0
// The row of FSDP2 with DTensor.
#include <utility>

#include "subjects/parallel/fsdp/fsdp_tp_numerics.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

TrainerParts make_fsdp_tp(const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
  const auto model = make_model(config.model, config.attention);
  ShardPlan plan =
      autotp_plan(*model, mesh.degree(Axis::kTp), config.settings.make_vocab_size_divisible_by);
  if (edits.plan) edits.plan(plan, mesh);
  return fsdp_tp_parts(config, mesh, std::move(plan));
}

}  // namespace

SubjectSpec fsdp_tp_subject() {
  return {.name = "fsdp_tp",
          .title = "FSDP+DTensor",
          .summary =
              "FSDP2 + DTensor: parameters sharded by rows over dp, gathered layer by layer, "
              "on top of column and row layers",
          .copy_of = "PyTorch FSDP2 with DTensor",
          .aliases = {"fsdp", "fsdp2", "fsdp_dtensor"},
          .axes = {Axis::kDp, Axis::kTp},
          .settings = {"make_vocab_size_divisible_by", "reduce_dtype", "output_dtype",
                       "grad_average", "clip_norm"},
          .traits = kFsdpTpTraits,
          .make_parts = make_fsdp_tp,
          .make_numerics = fsdp_tp_numerics};
}

}  // namespace isoshard
