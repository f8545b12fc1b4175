// SPDX-License-Identifier: Apache-2.0
// The row of Megatron-Core.
#include <utility>

#include "subjects/parallel/megatron/megatron_numerics.h"
#include "subjects/parallel/megatron/megatron_plan.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

TrainerParts make_megatron(const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
  const auto model = make_model(config.model, config.attention);
  ShardPlan plan =
      megatron_plan(*model, mesh.degree(Axis::kTp), config.settings.make_vocab_size_divisible_by);
  if (edits.plan) edits.plan(plan, mesh);
  return megatron_parts(config, mesh, std::move(plan));
}

}  // namespace

SubjectSpec megatron_subject() {
  return {.name = "megatron",
          .title = "Megatron-Core",
          .summary =
              "Megatron-Core: sequence and vocabulary split over tp, fp32 main gradients, "
              "distributed optimizer",
          .copy_of = "Megatron-Core",
          .axes = {Axis::kDp, Axis::kTp},
          .settings = {"make_vocab_size_divisible_by", "sequence_parallel", "distributed_optimizer",
                       "grad_average"},
          .traits = kMegatronTraits,
          .make_parts = make_megatron,
          .make_numerics = megatron_numerics};
}

}  // namespace isoshard
