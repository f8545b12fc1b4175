// SPDX-License-Identifier: Apache-2.0
/// The commands of isoshard-judge: those of isoshard that need no LibTorch.
#include "app/judge/judge_program.h"

#include <fmt/format.h>

#include <array>
#include <clocale>

#include "harness/cli/output.h"
#include "harness/compare/bundle_command.h"
#include "harness/compare/compare_command.h"
#include "harness/compare/respond_command.h"
#include "subjects/registry/curve_ceilings.h"

namespace isoshard {

int run_judge(const std::vector<std::string>& arguments) {
  prepare_output();
  std::setlocale(LC_ALL, "C");
  ProgramWords words{
      "isoshard-judge",
      "isoshard-judge judges stored runs of parallel training. It runs nothing and needs no "
      "LibTorch.",
      "", "compare runs/reference runs/ddp"};
  for (const char* name : {"convert", "judge", "preflight"})
    words.elsewhere[name] =
        fmt::format("a command of the Python package: python -m isoshard {}", name);
  const Command compare = compare_command(
      "  isoshard-judge compare runs/reference runs/ddp               two bundles\n"
      "  isoshard-judge compare --input-dir runs                      every run of a folder\n"
      "  isoshard-judge compare loss_reference.json loss_ddp.json     two loss curves\n"
      "  isoshard-judge compare --checkpoint model model-resharded      two checkpoints",
      kCurveCeilings);
  const std::array commands{compare, respond_command("isoshard-judge"),
                            bundle_command("isoshard-judge")};
  return run_command_line(words, commands, arguments);
}

}  // namespace isoshard
