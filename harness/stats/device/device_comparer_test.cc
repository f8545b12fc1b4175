// SPDX-License-Identifier: Apache-2.0
/// A comparer on a device says what accumulate() says: over the emulated grid.
#include "harness/stats/device/device_comparer.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/base/error.h"
#include "harness/stats/device/device_stats.h"
#include "harness/stats/device/emulated_device.h"
#include "harness/stats/device/test_pairs.h"

namespace isoshard {
namespace {

/// Runs of a tensor that is cut: short ones, one of several blocks, one of no element.
const std::vector<ComparedRun> kRuns{{7, 3}, {1, 100}, {0, 200}, {9000, 1000}, {33, 50'000}};
constexpr std::int64_t kElements = 7 + 1 + 9000 + 33;

/// accumulate() of each run.
Stats stats_of_runs(const Pair& pair, Dtype dtype, double scale, const std::uint8_t* selected) {
  Stats stats;
  std::int64_t done = 0;
  for (const ComparedRun& run : kRuns) {
    const auto begin = static_cast<std::size_t>(done) * size_of(dtype);
    accumulate(stats, pair.reference.data() + begin, dtype, pair.actual.data() + begin, dtype,
               run.count, run.index, scale, selected == nullptr ? nullptr : selected + done);
    done += run.count;
  }
  return stats;
}

ComparedPair pair_of(const Pair& pair, Dtype dtype, double scale, const std::uint8_t* selected) {
  return {pair.reference.data(), pair.actual.data(), selected, dtype, dtype, scale};
}

class DeviceComparerOf : public testing::TestWithParam<Dtype> {};

TEST_P(DeviceComparerOf, RunsSaysWhatTheCpuSaysOfEachAndUploadsAPairOnce) {
  const Dtype dtype = GetParam();
  device::DeviceCalls calls;
  const std::unique_ptr<Comparer> comparer = device::emulated_comparer(calls);
  std::vector<std::uint8_t> some(kElements);
  for (std::size_t i = 0; i < some.size(); ++i) some[i] = i % 3 == 0 ? 0 : 1;
  std::uint32_t seed = 0;
  for (const Change change : kChanges) {
    for (const double scale : {1.0, 3.0}) {
      for (const std::uint8_t* selected : {static_cast<const std::uint8_t*>(nullptr),
                                           static_cast<const std::uint8_t*>(some.data())}) {
        const Pair pair = make_pair(dtype, kElements, change, ++seed);
        calls = {};
        Stats got;

        comparer->accumulate(got, pair_of(pair, dtype, scale, selected), kRuns);

        EXPECT_EQ(difference(got, stats_of_runs(pair, dtype, scale, selected)), "")
            << "change " << static_cast<int>(change) << ", scale " << scale << ", seed " << seed;
        const std::int64_t bytes = 2 * static_cast<std::int64_t>(size_of(dtype));
        EXPECT_EQ(calls.uploads, selected == nullptr ? 2 : 3);
        EXPECT_EQ(calls.bytes_uploaded, kElements * (selected == nullptr ? bytes : bytes + 1));
        EXPECT_EQ(calls.comparisons, static_cast<int>(kRuns.size()));
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Every, DeviceComparerOf, testing::ValuesIn(kDtypes),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

TEST(DeviceComparer, AddsToWhatIsThereAndAsksNothingOfTheDeviceForNoElement) {
  device::DeviceCalls calls;
  const std::unique_ptr<Comparer> comparer = device::emulated_comparer(calls);
  const Pair pair = make_pair(Dtype::kFloat32, kElements, Change::kFewUlps, 1);
  Stats want = stats_of_runs(pair, Dtype::kFloat32, 1, nullptr);
  Stats got = want;
  merge(want, stats_of_runs(pair, Dtype::kFloat32, 1, nullptr));

  comparer->accumulate(got, pair_of(pair, Dtype::kFloat32, 1, nullptr), kRuns);
  const device::DeviceCalls before = calls;
  comparer->accumulate(got, {}, {});

  EXPECT_EQ(difference(got, want), "");
  EXPECT_EQ(calls.uploads, before.uploads);
}

TEST(DeviceComparer, WithoutCudaTheGpuIsNotBuiltAndNoProgramHasAComparerUntilItSaysSo) {
  EXPECT_FALSE(gpu_comparer());
  if (has_device_stats()) return;  // tests of label gpu have it
  EXPECT_THROW((void)comparing_gpu(), NotBuiltError);
}

}  // namespace
}  // namespace isoshard
