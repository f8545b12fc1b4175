// SPDX-License-Identifier: Apache-2.0
/// The program with CUDA and NCCL.
#include "app/program.h"
#include "core/comm/nccl/cuda_api.h"
#include "core/system/standard_descriptors.h"
#include "harness/cli/output.h"
#include "harness/recorder/device/use_device_stats.h"
#include "harness/world/end_process.h"

int main(int argc, char** argv) {
  isoshard::occupy_standard_descriptors();
  isoshard::use_cuda();
  isoshard::use_device_stats();
  if (argc > 0) isoshard::set_started_as(argv[0]);
  isoshard::end_process(isoshard::run_program({argv + 1, argv + argc}));
}
