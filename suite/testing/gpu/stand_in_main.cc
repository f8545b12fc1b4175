// SPDX-License-Identifier: Apache-2.0
/// The main of test programs of the nccl backend on machines without a GPU.
#include "suite/testing/gpu/gpu_stand_in.h"
#include "suite/testing/gpu/nccl_main.h"

int main(int argc, char** argv) {
  isoshard::GpuFabric fabric(isoshard::GpuFabric::kMaxRanks);
  return isoshard::run_on_gpu_ranks(argc, argv, [&](int rank, int /*size*/) {
    return std::make_shared<isoshard::GpuStandIn>(fabric, rank);
  });
}
