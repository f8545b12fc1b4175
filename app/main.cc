// SPDX-License-Identifier: Apache-2.0
/// The program.
#include "app/program.h"

int main(int argc, char** argv) {
  return isoshard::run_program({argv + 1, argv + argc});
}
