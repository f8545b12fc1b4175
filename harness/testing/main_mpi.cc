// SPDX-License-Identifier: Apache-2.0
/// The main of a test program whose ranks are forked, or, as mpirun -n 4 PROGRAM --attach, are the
/// processes of mpirun.
#include "harness/testing/test_program.h"
#include "harness/world/end_process.h"

int main(int argc, char** argv) {
  isoshard::end_process(isoshard::run_test_program(argc, argv, isoshard::attach_mpi_job));
}
