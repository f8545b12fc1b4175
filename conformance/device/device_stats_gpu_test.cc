// SPDX-License-Identifier: Apache-2.0
// On a GPU: the kernels say what the CPU's loops say.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "core/tensor/device.h"
#include "harness/stats/device/device_stats.h"
#include "harness/stats/device/test_pairs.h"

namespace isoshard {
namespace {

/// Bytes in the GPU's memory, `offset` behind an address that is aligned.
class OnGpu {
 public:
  OnGpu(const void* data, std::size_t bytes, std::size_t offset = 0) : offset_(offset) {
    const c10::Device device = device_of_rank(0);
    memory_ = at::empty({static_cast<std::int64_t>(bytes + offset + 1)},
                        at::TensorOptions().dtype(at::kByte).device(device));
    copy_to_device(static_cast<std::byte*>(memory_.data_ptr()) + offset,
                   static_cast<const std::byte*>(data), bytes, device);
  }
  [[nodiscard]] const std::byte* data() const {
    return static_cast<const std::byte*>(memory_.const_data_ptr()) + offset_;
  }

 private:
  at::Tensor memory_;
  std::size_t offset_;
};

class DeviceStatsOnGpu : public testing::TestWithParam<Dtype> {};

TEST_P(DeviceStatsOnGpu, SaysWhatTheCpuSaysOfEverySizeAndChange) {
  const Dtype dtype = GetParam();
  DeviceStats device(nullptr);
  std::uint32_t seed = 0;
  for (const std::int64_t count : kCounts) {
    for (const Change change : kChanges) {
      const Pair pair = make_pair(dtype, count, change, ++seed);
      // tensors begin anywhere that their elements may
      const std::size_t offset = seed % 3 * size_of(dtype);
      const OnGpu reference(pair.reference.data(), pair.reference.size(), offset);
      const OnGpu actual(pair.actual.data(), pair.actual.size());
      for (const double scale : {1.0, 3.0}) {
        Stats want;
        Stats got;
        accumulate(want, pair.reference.data(), dtype, pair.actual.data(), dtype, count, 1000,
                   scale);

        device.accumulate(got, reference.data(), dtype, actual.data(), dtype, count, 1000, scale);

        SCOPED_TRACE(testing::Message() << count << " elements, change " << static_cast<int>(change)
                                        << ", scale " << scale << ", seed " << seed);
        EXPECT_EQ(difference(got, want), "");
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Every, DeviceStatsOnGpu, testing::ValuesIn(kDtypes),
                         [](const auto& param_info) {
                           return std::string(name_of(param_info.param));
                         });

TEST(DeviceStatsOnGpuOf, LargeTensorsAndSelectionsAreAsOnTheCpu) {
  constexpr std::int64_t kCount = (4 << 20) + 3;
  DeviceStats device(nullptr);
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat32}) {
    const Pair pair = make_pair(dtype, kCount, Change::kFewUlps, 5);
    std::vector<std::uint8_t> selected(static_cast<std::size_t>(kCount));
    std::mt19937 generator(7);
    for (std::uint8_t& byte : selected) byte = static_cast<std::uint8_t>(generator() % 3);
    const OnGpu reference(pair.reference.data(), pair.reference.size());
    const OnGpu actual(pair.actual.data(), pair.actual.size());
    const OnGpu which(selected.data(), selected.size());
    for (const bool some : {false, true}) {
      Stats want;
      Stats got;
      accumulate(want, pair.reference.data(), dtype, pair.actual.data(), dtype, kCount, 0, 1.0,
                 some ? selected.data() : nullptr);

      device.accumulate(got, reference.data(), dtype, actual.data(), dtype, kCount, 0, 1.0,
                        some ? reinterpret_cast<const std::uint8_t*>(which.data()) : nullptr);

      EXPECT_EQ(difference(got, want), "");
    }
  }
}

TEST(DeviceStatsOnGpuOf, DigestsAreThoseOfTheCpu) {
  std::mt19937 generator(11);
  Bytes bytes((5 << 20) + 17);
  for (std::byte& b : bytes) b = static_cast<std::byte>(generator());
  const OnGpu own(bytes.data(), bytes.size(), 1);
  DeviceStats device(nullptr);

  for (const std::size_t n :
       {std::size_t{0}, std::size_t{1}, std::size_t{240}, std::size_t{241}, std::size_t{1023},
        std::size_t{1024}, std::size_t{1025}, std::size_t{70'001}, bytes.size()}) {
    for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{99}})
      EXPECT_EQ(device.digest_of(own.data(), n, seed), digest_of(bytes.data(), n, seed)) << n;
  }
}

}  // namespace
}  // namespace isoshard
