// SPDX-License-Identifier: Apache-2.0
// The row of the trusted single process.
#include "core/base/reference_name.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

TrainerParts make_plain(const TrainerConfig& config, Mesh& mesh, const SubjectEdits& edits) {
  refuse_plan_edit(edits, "the reference");
  return plain_parts(config, mesh, config.num_loss_groups);
}

}  // namespace

SubjectSpec plain_subject() {
  return {.name = kReferenceName,
          .title = "Reference",
          .summary = "the trusted single process: nothing sharded, nothing reduced",
          .role = SubjectRole::kReference,
          .axes = {Axis::kDp},
          .settings = {"reduce_dtype", "output_dtype"},
          .make_parts = make_plain};
}

}  // namespace isoshard
