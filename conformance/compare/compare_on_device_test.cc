// SPDX-License-Identifier: Apache-2.0
// compare says with tensors on a device what it says on the CPU: over the emulated grid, whose
// control flow is the GPU's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <ostream>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "harness/checkpoints/checkpoint_files_for_tests.h"
#include "harness/stats/device/emulated_device.h"
#include "suite/testing/device_reports.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using device_reports::difference_of;
using device_reports::written_runs;
using device_reports::WrittenRuns;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// A reference and a run of a framework of docs/frameworks/README.md, right or with a planted bug.
struct StoredRun {
  std::string framework, name;
};

void PrintTo(const StoredRun& run, std::ostream* out) {
  *out << run.framework << '/' << run.name;
}

std::vector<StoredRun> stored_runs() {
  std::set<fs::path> runs;
  for (const auto& framework : fs::directory_iterator(ISOSHARD_FRAMEWORKS_DIR)) {
    for (const auto& run : fs::directory_iterator(framework)) {
      if (run.is_directory() && run.path().filename() != "reference") runs.insert(run.path());
    }
  }
  std::vector<StoredRun> all;
  for (const fs::path& run : runs)
    all.push_back({run.parent_path().filename().string(), run.filename().string()});
  return all;
}

/// What compare says on the CPU and over the emulated grid.
struct BothReports {
  Report on_cpu, on_device;
  int comparisons = 0;  ///< over the emulated grid
};

BothReports both_reports(ComparePlan plan) {
  BothReports both;
  both.on_cpu = compare(plan);
  device::DeviceCalls calls;
  const std::unique_ptr<Comparer> comparer = device::emulated_comparer(calls);
  plan.comparer = comparer.get();
  both.on_device = compare(plan);
  both.comparisons = calls.comparisons;
  return both;
}

class CompareOnDevice : public ::testing::TestWithParam<StoredRun> {};

TEST_P(CompareOnDevice, SaysOfAStoredRunWhatTheCpuSays) {
  const auto& [framework, name] = GetParam();
  ComparePlan plan;
  plan.reference = fs::path(ISOSHARD_FRAMEWORKS_DIR) / framework / "reference";
  plan.actual = fs::path(ISOSHARD_FRAMEWORKS_DIR) / framework / name;
  if (framework == "torchtitan") plan.rules.grad_scale = 1;

  const auto [on_cpu, on_device, comparisons] = both_reports(plan);

  EXPECT_EQ(difference_of(on_device, on_cpu), "");
  EXPECT_EQ(on_cpu.exit_code, name == "right" ? 0 : 1);
  EXPECT_GT(comparisons, 20);
}
INSTANTIATE_TEST_SUITE_P(Frameworks, CompareOnDevice, ::testing::ValuesIn(stored_runs()),
                         [](const auto& tested) {
                           return tested.param.framework + "_" + tested.param.name;
                         });

TEST(CompareOnDeviceRuns, OfLargerTensorsGetTheReportOfTheCpu) {
  const WrittenRuns runs;
  device::DeviceCalls calls;
  const std::unique_ptr<Comparer> comparer = device::emulated_comparer(calls);
  for (const auto& written : written_runs()) {
    calls = {};
    const Report on_cpu = compare(runs.plan(written.name, nullptr));

    const Report on_device = compare(runs.plan(written.name, comparer.get()));

    EXPECT_EQ(difference_of(on_device, on_cpu), "") << written.name;
    EXPECT_EQ(on_cpu.exit_code, written.name == "right" ? 0 : 1) << written.name;
    EXPECT_EQ(calls.uploads, 2 * 6 * 6) << "six ranks have one part of each of six tensors";
  }
}

/// What accumulate() says, changed.
class ChangedComparer final : public Comparer {
 public:
  explicit ChangedComparer(std::function<void(Stats&)> change) : change_(std::move(change)) {}
  void accumulate(Stats& stats, const ComparedPair& pair,
                  std::span<const ComparedRun> runs) override {
    emulated_->accumulate(stats, pair, runs);
    change_(stats);
  }

 private:
  std::function<void(Stats&)> change_;
  device::DeviceCalls calls_;
  std::unique_ptr<Comparer> emulated_ = device::emulated_comparer(calls_);
};

// The controls: the verdict is made of what the comparer says, and of nothing else.
TEST(CompareOnDeviceRuns, AreJudgedByWhatTheComparerSays) {
  const WrittenRuns runs;
  ChangedComparer blind([](Stats& stats) {
    Stats equal;
    equal.numel = stats.numel;
    equal.sum_sq_reference = equal.sum_sq_actual = equal.dot = stats.sum_sq_reference;
    equal.max_abs_reference = stats.max_abs_reference;
    stats = equal;
  });
  ChangedComparer strict([](Stats& stats) { stats.nonfinite_mismatch = 1; });

  EXPECT_EQ(compare(runs.plan("scaled", &blind)).exit_code, 0);
  EXPECT_EQ(compare(runs.plan("right", &strict)).exit_code, 1);
}

TEST(CompareOnDeviceRuns, AreConfirmedThoughSumsWereAddedInAnotherOrder) {
  const WrittenRuns runs;
  const auto first_of = [&](double factor) {
    ChangedComparer other([factor](Stats& stats) { stats.sum_sq_diff *= factor; });
    const Report report = compare(runs.plan("scaled", &other));
    return report.cases.at(0).verdict->findings.at(0);
  };

  EXPECT_TRUE(first_of(1 + 0x1p-45).confirmed);
  EXPECT_FALSE(first_of(1 + 1e-9).confirmed) << "no order of sums does that";
}

TEST(CompareOnDeviceCheckpoints, GetTheReportOfTheCpu) {
  using namespace checkpoint_tests;
  const TestFolder folder;
  Tensors tensors = model();
  save(folder / "a/model.safetensors", tensors);
  save(folder / "right/model.safetensors", tensors);
  value(tensors[1].second, 6) += 0x1p-20F;
  save(folder / "wrong/model.safetensors", tensors);
  for (const char* name : {"right", "wrong"}) {
    ComparePlan plan;
    plan.are_checkpoints = true;
    plan.reference = folder / "a";
    plan.actual = folder / name;

    const auto [on_cpu, on_device, comparisons] = both_reports(plan);

    EXPECT_EQ(difference_of(on_device, on_cpu), "");
    EXPECT_EQ(on_cpu.exit_code, plan.actual.filename() == "right" ? 0 : 1);
    EXPECT_EQ(comparisons, static_cast<int>(model().size()));
  }
}

TEST(CompareOnDeviceCurves, HaveNoTensorsAndAreRefused) {
  const TestFolder folder;
  device::DeviceCalls calls;
  const std::unique_ptr<Comparer> comparer = device::emulated_comparer(calls);
  ComparePlan plan;
  plan.reference = folder / "a.json";
  plan.actual = folder / "b.json";
  plan.comparer = comparer.get();

  EXPECT_THAT([&] { require_comparable(plan); },
              ThrowsMessage<UsageError>(HasSubstr("--device must be cpu where two loss curves")));
}

}  // namespace
}  // namespace isoshard
