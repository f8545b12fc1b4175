// SPDX-License-Identifier: Apache-2.0
/// The main of isoshard_gpu_test: with --ranks=N a program whose N ranks live for all of its tests,
/// otherwise one that forks worlds. Ends with 77, and why, where there is no GPU.
#include <cstdio>
#include <string_view>

#include "core/base/error.h"
#include "core/comm/nccl/cuda_api.h"
#include "harness/recorder/device/use_device_stats.h"
#include "harness/testing/test_program.h"
#include "harness/world/end_process.h"
#include "suite/testing/gpu/nccl_main.h"

namespace {

bool has_argument(int argc, char** argv, std::string_view beginning) {
  for (int i = 1; i < argc; ++i) {
    if (std::string_view(argv[i]).starts_with(beginning)) return true;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (!has_argument(argc, argv, "--gtest_list_tests")) {
    if (const std::string why = isoshard::why_no_gpu(); !why.empty()) {
      std::printf("CUDA says: %s\n", why.c_str());
      return 77;
    }
  }
  isoshard::use_cuda();
  isoshard::use_device_stats();
  if (has_argument(argc, argv, "--ranks=")) {
    isoshard::end_process(isoshard::run_on_gpu_ranks(argc, argv, isoshard::make_cuda_api));
  }
  isoshard::end_process(
      isoshard::run_test_program(argc, argv, []() -> std::unique_ptr<isoshard::AttachedJob> {
        throw isoshard::NotBuiltError("this program attaches to no job; leave --attach out");
      }));
}
