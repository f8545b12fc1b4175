// SPDX-License-Identifier: Apache-2.0
/// isoshard-judge: the part of isoshard that judges stored runs, without LibTorch.
#include "app/judge/judge_program.h"
#include "harness/cli/output.h"
#include "harness/ids/named_values.h"

int main(int argc, char** argv) {
  isoshard::keep_gaps();
  if (argc > 0) isoshard::set_started_as(argv[0]);
  return isoshard::run_judge({argv + 1, argv + argc});
}
