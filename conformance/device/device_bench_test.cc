// SPDX-License-Identifier: Apache-2.0
// Timed runs whose tensors are on a device: that of tests, with a stand-in for NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/comm/nccl/nccl_world.h"
#include "harness/testing/device/test_device.h"
#include "suite/bench/bench_run.h"
#include "suite/reference/device/device_collectives.h"
#include "suite/testing/gpu/gpu_stand_in.h"
#include "suite/testing/step_cases.h"

namespace isoshard {
namespace {

const c10::Device kBenchDevice = test_device();

Case timed_case(Device::Kind device) {
  Case item = step_case("fsdp_tp", {.dp = 2, .tp = 1});
  item.steps = 3;
  item.device = device;
  return item;
}

std::vector<double> losses(const BenchRun& run) {
  std::vector<double> result;
  for (const RankStep& step : run.ranks.front().steps) result.push_back(step.loss);
  return result;
}

void expect_whole(const BenchRun& run) {
  ASSERT_EQ(run.ranks.size(), 2U);
  for (const RankRun& rank : run.ranks) {
    ASSERT_EQ(rank.steps.size(), 3U);
    EXPECT_GT(rank.setup_bytes, 0);
    for (const RankStep& step : rank.steps) {
      EXPECT_GT(step.memory.peak, step.memory.allocated);
      EXPECT_GT(step.times.of(StepPart::kForward), 0);
      EXPECT_GT(step.times.of(StepPart::kCommunication), 0);
      EXPECT_NEAR(std::accumulate(step.times.parts.begin(), step.times.parts.end(), 0.0),
                  step.times.total, 1e-9);
    }
  }
}

// The same steps: losses are equal to the bit, and what is held is what tensors of the CPU hold.
TEST(DeviceBench, TimesTheStepsOfTheCpuStagedAndThroughNccl) {
  ASSERT_EQ(kBenchDevice.type(), c10::DeviceType::PrivateUse1);
  const BenchRunOptions options{.warmup_steps = 1};
  const BenchRun on_cpu = run_bench(timed_case(Device::Kind::kCpu), options);
  const Case item = timed_case(Device::Kind::kCuda);
  forget_shared_gpus();
  EXPECT_THAT(device_collectives(item).words, testing::StartsWith("shm, staged"));

  const BenchRun staged = run_bench(item, options);

  GpuFabric fabric(GpuFabric::kMaxRanks);
  set_gpu_api([&](int rank, int /*size*/) {
    auto gpu = std::make_shared<GpuStandIn>(fabric, rank);
    gpu->set_other_memory(is_on_test_device);
    return gpu;
  });
  EXPECT_THAT(device_collectives(item).words, testing::StartsWith("nccl, "));
  const BenchRun through_nccl = run_bench(item, options);
  set_gpu_api({});
  forget_shared_gpus();

  for (const BenchRun* run : {&on_cpu, &staged, &through_nccl}) {
    expect_whole(*run);
    EXPECT_EQ(losses(*run), losses(on_cpu));
  }
  EXPECT_LE(staged.ranks[0].setup_bytes, on_cpu.ranks[0].setup_bytes);
  EXPECT_GT(2 * staged.ranks[0].setup_bytes, on_cpu.ranks[0].setup_bytes);
}

}  // namespace
}  // namespace isoshard
