// SPDX-License-Identifier: Apache-2.0
/// What stands between LibTorch's tensors and the kernels of harness/stats/device.
#include "harness/recorder/device/use_device_stats.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <memory>
#include <utility>

#include "harness/recorder/device_digest.h"
#include "harness/stats/comparer.h"
#include "harness/stats/device/device_comparer.h"
#include "harness/stats/device/device_stats.h"

namespace isoshard {
namespace {

class CudaDigest final : public DeviceDigest {
 public:
  std::uint64_t digest_of(const at::Tensor& tensor) override {
    const c10::DeviceGuard guard(tensor.device());
    const c10::impl::VirtualGuardImpl cuda(tensor.device().type());
    void* const stream = cuda.getStream(tensor.device()).native_handle();
    std::unique_ptr<DeviceStats>& stats = stats_[{tensor.device().index(), stream}];
    if (stats == nullptr) stats = std::make_unique<DeviceStats>(stream);
    return stats->digest_of(static_cast<const std::byte*>(tensor.const_data_ptr()),
                            tensor.nbytes());
  }

 private:
  /// By GPU and stream: backward passes and pipelines may have streams of their own.
  std::map<std::pair<c10::DeviceIndex, void*>, std::unique_ptr<DeviceStats>> stats_;
};

}  // namespace

void use_device_stats() {
  set_device_digest(c10::DeviceType::CUDA, [] { return std::make_unique<CudaDigest>(); });
  set_gpu_comparer([] { return comparer_on(comparing_gpu()); });
}

}  // namespace isoshard
