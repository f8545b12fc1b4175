// SPDX-License-Identifier: Apache-2.0
// The row of PyTorch DDP.
#include "subjects/parallel/ddp/ddp_arithmetic.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

TrainerParts make(const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
  refuse_plan_edit(edits, "ddp");
  return ddp_parts(config, mesh);
}

}  // namespace

SubjectSpec ddp_subject() {
  return {.name = "ddp",
          .title = "DDP",
          .summary = "PyTorch DDP: replicas, bucketed gradient all-reduce during backward",
          .axes = {Axis::kDp},
          .make_parts = make,
          .make_arithmetic = ddp_arithmetic};
}

}  // namespace isoshard
