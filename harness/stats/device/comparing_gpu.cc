// SPDX-License-Identifier: Apache-2.0
/// Memory of the current CUDA device, and DeviceStats on a stream beside it.
#include <cuda_runtime.h>

#include <array>
#include <string>

#include "core/base/error.h"
#include "harness/stats/device/device_comparer.h"
#include "harness/stats/device/device_stats.h"

namespace isoshard {
namespace {

void check(cudaError_t code, const std::string& what) {
  if (code == cudaSuccess) return;
  throw InfrastructureError("CUDA failed to " + what + ": " + cudaGetErrorString(code) + " (" +
                            cudaGetErrorName(code) + ")");
}

class Stream {
 public:
  Stream() { check(cudaStreamCreate(&stream_), "make a stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class ComparingGpu final : public ComparingDevice {
 public:
  ComparingGpu() : stats_(stream_.get()) {}
  ~ComparingGpu() override {
    for (const Memory& memory : memory_) cudaFree(memory.data);
  }
  ComparingGpu(const ComparingGpu&) = delete;
  ComparingGpu& operator=(const ComparingGpu&) = delete;

  const std::byte* upload(Buffer buffer, const std::byte* host, std::size_t bytes) override {
    Memory& memory = memory_[static_cast<std::size_t>(buffer)];
    if (bytes > memory.bytes) {
      check(cudaFree(memory.data), "free memory of a smaller tensor");
      memory = {};
      check(cudaMalloc(&memory.data, bytes), "get " + std::to_string(bytes) +
                                                 " bytes of the GPU's memory for a tensor; compare "
                                                 "with --device cpu");
      memory.bytes = bytes;
    }
    check(cudaMemcpyAsync(memory.data, host, bytes, cudaMemcpyHostToDevice, stream_.get()),
          "copy a tensor to the GPU");
    check(cudaStreamSynchronize(stream_.get()), "copy a tensor to the GPU");
    return static_cast<const std::byte*>(memory.data);
  }

  void accumulate(Stats& stats, const std::byte* reference, Dtype reference_dtype,
                  const std::byte* actual, Dtype actual_dtype, std::int64_t count,
                  std::int64_t index, double grad_scale, const std::uint8_t* selected) override {
    stats_.accumulate(stats, reference, reference_dtype, actual, actual_dtype, count, index,
                      grad_scale, selected);
  }

 private:
  struct Memory {
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  Stream stream_;
  DeviceStats stats_;
  std::array<Memory, 3> memory_;  ///< one for each Buffer
};

}  // namespace

std::unique_ptr<ComparingDevice> comparing_gpu() {
  return std::make_unique<ComparingGpu>();
}

}  // namespace isoshard
