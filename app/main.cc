// SPDX-License-Identifier: Apache-2.0
/// The program.
#include "app/program.h"
#include "core/system/standard_descriptors.h"
#include "harness/cli/output.h"
#include "harness/ids/named_values.h"
#include "harness/world/end_process.h"

int main(int argc, char** argv) {
  isoshard::keep_gaps();
  isoshard::occupy_standard_descriptors();
  if (argc > 0) isoshard::set_started_as(argv[0]);
  isoshard::end_process(isoshard::run_program({argv + 1, argv + argc}));
}
