// SPDX-License-Identifier: Apache-2.0
// The row of torchtitan's N-D parallelism.
#include <utility>

#include "subjects/parallel/nd/nd_numerics.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

TrainerParts make_nd(const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
  const auto model = make_model(config.model, config.attention);
  ShardPlan plan =
      autotp_plan(*model, mesh.degree(Axis::kTp), config.settings.make_vocab_size_divisible_by);
  if (edits.plan) edits.plan(plan, mesh);
  return nd_parts(config, mesh, std::move(plan));
}

}  // namespace

SubjectSpec nd_subject() {
  return {.name = "nd",
          .title = "torchtitan N-D",
          .summary =
              "torchtitan: FSDP or HSDP x tensor x pipeline x context parallelism, any subset of "
              "them",
          .copy_of = "torchtitan with torch.distributed.pipelining and context_parallel",
          .aliases = {"torchtitan"},
          .axes = {Axis::kPp, Axis::kDp, Axis::kCp, Axis::kTp},
          .settings = {"make_vocab_size_divisible_by", "sequence_parallel", "reduce_dtype",
                       "output_dtype", "dp_replicate", "context_order", "context_attention",
                       "ring_merge_dtype", "pipeline_schedule", "stages_per_rank",
                       "stage_placement", "layers_per_stage", "grad_average", "clip_norm"},
          .traits = kNdTraits,
          .make_parts = make_nd,
          .make_numerics = nd_numerics};
}

}  // namespace isoshard
