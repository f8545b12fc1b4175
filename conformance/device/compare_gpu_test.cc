// SPDX-License-Identifier: Apache-2.0
// compare with tensors on a GPU.
#include <gtest/gtest.h>

#include <memory>

#include "harness/recorder/device/use_device_stats.h"
#include "harness/stats/comparer.h"
#include "suite/testing/device_reports.h"

namespace isoshard {
namespace {

using device_reports::difference_of;
using device_reports::written_runs;
using device_reports::WrittenRuns;

TEST(CompareOnGpu, GivesTheReportOfTheCpu) {
  use_device_stats();
  const WrittenRuns runs;
  const std::unique_ptr<Comparer> comparer = gpu_comparer()();
  for (const auto& written : written_runs()) {
    const Report on_cpu = compare(runs.plan(written.name, nullptr));

    const Report on_gpu = compare(runs.plan(written.name, comparer.get()));

    EXPECT_EQ(difference_of(on_gpu, on_cpu), "") << written.name;
    EXPECT_EQ(on_gpu.exit_code, written.name == "right" ? 0 : 1) << written.name;
  }
}

}  // namespace
}  // namespace isoshard
