// SPDX-License-Identifier: Apache-2.0
/// A rank of backend nccl as torchrun or mpirun starts it, without a library of MPI and without a
/// GPU: it meets the others and makes calls that move no data.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "core/base/error.h"
#include "core/comm/backend.h"
#include "core/comm/nccl/gpu_api.h"
#include "suite/testing/gpu/gpu_stand_in.h"

int main(int argc, char** argv) {
  using isoshard::CallInfo, isoshard::GpuFabric, isoshard::GpuStandIn;
  static GpuFabric fabric(1);
  isoshard::set_gpu_api(
      [](int /*rank*/, int /*size*/) { return std::make_shared<GpuStandIn>(fabric, 0); });
  try {
    const int expected = argc > 1 ? std::atoi(argv[1]) : 0;
    const bool differs = argc > 2 && std::string_view(argv[2]) == "differ";
    const auto comm = isoshard::attach_nccl_world({.expected_size = expected});
    const auto half = comm->split(comm->rank() % 2, comm->rank());
    half->barrier({});
    if (differs && comm->rank() == 0) (void)comm->split(0, 0);
    comm->barrier({});
    std::printf("rank %d of %d met\n", comm->rank(), comm->size());
    return 0;
  } catch (const isoshard::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
