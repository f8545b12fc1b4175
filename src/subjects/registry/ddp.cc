// SPDX-License-Identifier: Apache-2.0
// The row of PyTorch DDP.
#include "core/base/reference_name.h"
#include "subjects/parallel/ddp/ddp_numerics.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

TrainerParts make_ddp(const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
  refuse_plan_edit(edits, kBaselineName);
  return ddp_parts(config, mesh);
}

}  // namespace

SubjectSpec ddp_subject() {
  return {.name = kBaselineName,
          .title = "DDP",
          .summary = "PyTorch DDP: replicas, bucketed gradient all-reduce during backward",
          .copy_of = "PyTorch DDP",
          .axes = {Axis::kDp},
          .settings = {"grad_average", "clip_norm"},
          .make_parts = make_ddp,
          .make_numerics = ddp_numerics};
}

}  // namespace isoshard
