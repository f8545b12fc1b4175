// SPDX-License-Identifier: Apache-2.0
/// isoshard-judge: the part of isoshard that judges stored runs, without LibTorch.
#include <array>
#include <clocale>

#include "harness/cli/output.h"
#include "harness/compare/bundle_command.h"
#include "harness/compare/compare_command.h"
#include "harness/compare/respond_command.h"
#include "subjects/registry/curve_ceilings.h"

int main(int argc, char** argv) {
  isoshard::prepare_output();
  std::setlocale(LC_ALL, "C");
  const isoshard::ProgramWords words{
      "isoshard-judge",
      "isoshard-judge judges stored runs of parallel training. It runs nothing and needs no "
      "LibTorch.",
      "", "compare runs/reference runs/ddp"};
  const isoshard::Command compare = isoshard::compare_command(
      "  isoshard-judge compare runs/reference runs/ddp               two bundles\n"
      "  isoshard-judge compare --input-dir runs                      every run of a folder\n"
      "  isoshard-judge compare loss_reference.json loss_ddp.json     two loss curves\n"
      "  isoshard-judge compare --checkpoint model model-resharded      two checkpoints",
      isoshard::kCurveCeilings);
  const std::array commands{compare, isoshard::respond_command("isoshard-judge"),
                            isoshard::bundle_command("isoshard-judge")};
  return isoshard::run_command_line(words, commands, {argv + 1, argv + argc});
}
