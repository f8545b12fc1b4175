// SPDX-License-Identifier: Apache-2.0
// The published experiments with tensors on a device: that of tests, which has the CPU's bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "harness/testing/device/test_device.h"
#include "suite/published/experiment.h"

namespace isoshard {
namespace {

const c10::Device kExperimentDevice = test_device();

ExperimentSettings small(ExperimentKind kind) {
  ExperimentSettings settings = default_settings(kind, /*full=*/false);
  settings.tp = {2};
  settings.layers = 2;
  settings.hidden_size = 32;
  settings.num_heads = 4;
  settings.ffn_size = 64;
  settings.seq_length = 6;
  return settings;
}

void expect_findings_of_host_memory(ExperimentKind kind) {
  ASSERT_EQ(kExperimentDevice.type(), c10::DeviceType::PrivateUse1);
  ExperimentSettings settings = small(kind);
  const ExperimentReport on_cpu = run_experiment(kind, settings);
  settings.device = Device::Kind::kCuda;

  const Report report = report_experiment(kind, settings);

  ASSERT_EQ(report.experiments.size(), 1U);
  EXPECT_EQ(report.experiments[0].json, on_cpu.json);
  EXPECT_EQ(report.environment.at("device"), "cuda");
  EXPECT_EQ(report.environment.at("device.collectives"),
            "shm, staged through host memory: this program has no NCCL");
}

class DeviceExperiment : public ::testing::TestWithParam<ExperimentKind> {};

TEST_P(DeviceExperiment, FindsOnADeviceWhatItFindsInHostMemory) {
  expect_findings_of_host_memory(GetParam());
}
INSTANTIATE_TEST_SUITE_P(Small, DeviceExperiment,
                         ::testing::Values(ExperimentKind::kInit, ExperimentKind::kStack,
                                           ExperimentKind::kGrowth));

TEST(DeviceExperiment, SaysHowTheRanksOfEachWorldMeet) {
  ASSERT_EQ(kExperimentDevice.type(), c10::DeviceType::PrivateUse1);
  ExperimentSettings settings = small(ExperimentKind::kInit);
  settings.tp = {1, 2};
  settings.device = Device::Kind::kCuda;

  const Report report = report_experiment(ExperimentKind::kInit, settings);

  EXPECT_EQ(report.environment.at("device.collectives"),
            "1 rank: none: a world of one rank; 2 ranks: shm, staged through host memory: this "
            "program has no NCCL");
}

// It probes many shapes on up to 7 ranks.
TEST(DeviceExperimentWide, FindsOnADeviceWhatItFindsInHostMemory) {
  expect_findings_of_host_memory(ExperimentKind::kColumnRow);
}

}  // namespace
}  // namespace isoshard
