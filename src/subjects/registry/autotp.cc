// SPDX-License-Identifier: Apache-2.0
// The row of DeepSpeed AutoTP.
#include <utility>

#include "subjects/parallel/tensor/autotp_numerics.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

TrainerParts make_autotp(const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
  const auto model = make_model(config.model, config.attention);
  ShardPlan plan =
      autotp_plan(*model, mesh.degree(Axis::kTp), config.settings.make_vocab_size_divisible_by);
  if (edits.plan) edits.plan(plan, mesh);
  return autotp_parts(config, mesh, std::move(plan));
}

}  // namespace

SubjectSpec autotp_subject() {
  return {.name = "autotp",
          .title = "DeepSpeed AutoTP",
          .summary =
              "DeepSpeed AutoTP: column- and row-parallel linear layers, gradients averaged "
              "over dp, ZeRO 0, 1 or 2",
          .copy_of = "DeepSpeed AutoTP",
          .aliases = {"deepspeed"},
          .axes = {Axis::kDp, Axis::kTp},
          .settings = {"make_vocab_size_divisible_by", "zero_stage", "grad_average",
                       "accumulate_dtype"},
          .make_parts = make_autotp,
          .make_numerics = autotp_numerics};
}

}  // namespace isoshard
