// SPDX-License-Identifier: Apache-2.0
/// `isoshard compare A B`.
#include "harness/compare/compare_command.h"

#include <memory>

#include "app/commands.h"
#include "core/base/error.h"
#include "fixtures/cases/device_settings.h"
#include "harness/stats/comparer.h"
#include "subjects/registry/curve_ceilings.h"

namespace isoshard {
namespace {

std::unique_ptr<Comparer> comparer_on_gpu() {
  require_gpu();
  if (!gpu_comparer())
    throw UsageError(
        "device cuda must be a GPU that this program can use, got none: it has no kernels that "
        "compare; take --device cpu, or see docs/reference/gpu.md");
  return gpu_comparer()();
}

}  // namespace

Command compare_command() {
  return compare_command(
      "  isoshard verify --subjects ddp --dp 2 --dtype fp32 --dump runs\n"
      "  isoshard compare runs/reference_* runs/qwen2_dp2\n"
      "  isoshard compare curves/loss_reference.json curves/loss_ddp.json          two loss "
      "curves of isoshard train\n"
      "  isoshard compare --checkpoint model model-resharded                       two "
      "checkpoints\n"
      "  isoshard compare runs/reference_* runs/qwen2_dp2 --device cuda            the same on a "
      "GPU",
      kCurveCeilings, comparer_on_gpu);
}

}  // namespace isoshard
