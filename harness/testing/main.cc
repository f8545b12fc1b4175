// SPDX-License-Identifier: Apache-2.0
/// The main of a test program whose ranks are forked.
#include "core/base/error.h"
#include "harness/testing/test_program.h"
#include "harness/world/end_process.h"

int main(int argc, char** argv) {
  isoshard::end_process(
      isoshard::run_test_program(argc, argv, []() -> std::unique_ptr<isoshard::AttachedJob> {
        throw isoshard::NotBuiltError(
            "this program was linked without MPI; link isoshard::testing_main_mpi instead of "
            "isoshard::testing_main, or leave --attach out");
      }));
}
