// SPDX-License-Identifier: Apache-2.0
/// isoshard-judge: the part of isoshard that judges stored runs, without LibTorch.
#include "app/judge/judge_program.h"

int main(int argc, char** argv) {
  return isoshard::run_judge({argv + 1, argv + argc});
}
