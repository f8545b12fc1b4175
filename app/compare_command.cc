// SPDX-License-Identifier: Apache-2.0
/// `isoshard compare A B`.
#include "harness/compare/compare_command.h"

#include "app/commands.h"
#include "subjects/registry/curve_ceilings.h"

namespace isoshard {

Command compare_command() {
  return compare_command(
      "  isoshard verify --subjects ddp --dp 2 --dtype fp32 --dump runs\n"
      "  isoshard compare runs/reference_* runs/qwen2_dp2\n"
      "  isoshard compare curves/loss_reference.json curves/loss_ddp.json          two loss "
      "curves of isoshard train\n"
      "  isoshard compare --checkpoint model model-resharded                       two checkpoints",
      kCurveCeilings);
}

}  // namespace isoshard
