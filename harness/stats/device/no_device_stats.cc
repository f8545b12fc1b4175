// SPDX-License-Identifier: Apache-2.0
/// Stands in for the kernels in a build without CUDA.
#include "core/base/error.h"
#include "harness/stats/device/device_comparer.h"
#include "harness/stats/device/device_stats.h"

namespace isoshard {
namespace {

[[noreturn]] void refuse() {
  throw NotBuiltError(
      "statistics on a GPU are not part of this build; configure with -DISOSHARD_CUDA=ON, or "
      "compare copies in host memory");
}

}  // namespace

struct DeviceStats::Impl {};

DeviceStats::DeviceStats(void* /*stream*/) {
  refuse();
}
DeviceStats::~DeviceStats() = default;

void DeviceStats::accumulate(Stats& /*stats*/, const std::byte* /*reference*/,
                             Dtype /*reference_dtype*/, const std::byte* /*actual*/,
                             Dtype /*actual_dtype*/, std::int64_t /*count*/, std::int64_t /*index*/,
                             double /*grad_scale*/, const std::uint8_t* /*selected*/) {}

std::uint64_t DeviceStats::digest_of(const std::byte* /*data*/, std::size_t /*bytes*/,
                                     std::uint64_t /*seed*/) {
  return 0;
}

bool has_device_stats() noexcept {
  return false;
}

std::unique_ptr<ComparingDevice> comparing_gpu() {
  refuse();
}

}  // namespace isoshard
