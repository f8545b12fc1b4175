// SPDX-License-Identifier: Apache-2.0
/// The kernels' bodies on a GPU, and what launches them.
#include "harness/stats/device/device_stats.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "core/base/error.h"
#include "harness/stats/device/comparing.h"
#include "harness/stats/device/digesting.h"

namespace isoshard {
namespace {

using device::CompareLane;
using device::Comparing;
using device::DeviceWarp;
using device::DigestSecret;
using device::kAccumulators;
using device::kLanes;
using device::kMergedByThread;

// Fixed, so that results do not depend on the GPU: 15 warps for each of an H100's multiprocessors.
constexpr std::int64_t kMostWarps = 2048;
constexpr int kWarpsOfBlock = 4;
constexpr int kThreads = 256;

__global__ void __launch_bounds__(kWarpsOfBlock* kLanes, 4)
    compare_kernel(const Comparing run, Stats* partials, std::int64_t warps) {
  const std::int64_t index =
      static_cast<std::int64_t>(blockIdx.x) * kWarpsOfBlock + threadIdx.x / kLanes;
  if (index >= warps) return;  // a whole warp
  DeviceWarp<CompareLane> warp;
  const Stats result = device::compare_blocks(warp, run, index, warps);
  if (threadIdx.x % kLanes == 0) partials[index] = result;
}

__global__ void merge_kernel(const Stats* partials, std::int64_t count, Stats* merged) {
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread * kMergedByThread < count) merged[thread] = device::merged_by(thread, partials, count);
}

__global__ void sum_kernel(const std::byte* data, std::int64_t threads, const DigestSecret secret,
                           std::uint64_t* sums) {
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread < threads) device::sum_block(thread, data, secret, sums);
}

__global__ void chain_kernel(const std::byte* data, std::int64_t bytes, const DigestSecret secret,
                             const std::uint64_t* sums, std::uint64_t* digest) {
  __shared__ std::uint64_t accumulators[kAccumulators];
  accumulators[threadIdx.x] = device::chained(threadIdx.x, data, bytes, secret, sums);
  __syncthreads();
  if (threadIdx.x == 0) *digest = device::digest_of_accumulators(accumulators, bytes, secret);
}

void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  throw InfrastructureError(std::string("CUDA failed to ") + what + ": " +
                            cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")");
}

unsigned blocks_for(std::int64_t threads, int of_block) {
  return static_cast<unsigned>((threads + of_block - 1) / of_block);
}

}  // namespace

struct DeviceStats::Impl {
  explicit Impl(void* given) : stream(static_cast<cudaStream_t>(given)) {
    check(cudaMallocHost(&pinned, kResultBytes), "get pinned memory for results");
  }
  ~Impl() {
    cudaFreeAsync(scratch, stream);
    cudaFreeHost(pinned);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// Device memory that work enqueued before no longer needs when work enqueued later uses it.
  std::byte* scratch_of(std::int64_t bytes) {
    if (bytes > scratch_bytes) {
      if (scratch != nullptr) check(cudaFreeAsync(scratch, stream), "free scratch memory");
      scratch = nullptr;
      scratch_bytes = 0;
      void* memory = nullptr;
      check(cudaMallocAsync(&memory, static_cast<std::size_t>(bytes), stream),
            "get scratch memory");
      scratch = static_cast<std::byte*>(memory);
      scratch_bytes = bytes;
    }
    return scratch;
  }

  /// Waits for what is enqueued and brings `bytes` bytes.
  void fetch(const void* from, std::size_t bytes) {
    check(cudaGetLastError(), "launch a kernel");
    check(cudaMemcpyAsync(pinned, from, bytes, cudaMemcpyDefault, stream), "fetch a result");
    check(cudaStreamSynchronize(stream), "finish a kernel");
  }

  static constexpr std::size_t kResultBytes = 256;
  static_assert(sizeof(Stats) <= kResultBytes && device::kShortDigestBytes <= kResultBytes);

  cudaStream_t stream;
  void* pinned = nullptr;
  std::byte* scratch = nullptr;
  std::int64_t scratch_bytes = 0;
};

DeviceStats::DeviceStats(void* stream) : impl_(std::make_unique<Impl>(stream)) {}
DeviceStats::~DeviceStats() = default;

void DeviceStats::accumulate(Stats& stats, const std::byte* reference, Dtype reference_dtype,
                             const std::byte* actual, Dtype actual_dtype, std::int64_t count,
                             std::int64_t index, double grad_scale, const std::uint8_t* selected) {
  if (count == 0) return;
  const Comparing run = device::comparing(reference, reference_dtype, actual, actual_dtype, count,
                                          index, grad_scale, selected);
  const std::int64_t warps = std::min(kMostWarps, device::num_blocks(run));
  auto* partials = reinterpret_cast<Stats*>(
      impl_->scratch_of(2 * kMostWarps * static_cast<std::int64_t>(sizeof(Stats))));
  Stats* merged = partials + kMostWarps;
  compare_kernel<<<blocks_for(warps, kWarpsOfBlock), kWarpsOfBlock * kLanes, 0, impl_->stream>>>(
      run, partials, warps);
  for (std::int64_t left = warps; left > 1;) {
    const std::int64_t threads = (left + kMergedByThread - 1) / kMergedByThread;
    merge_kernel<<<blocks_for(threads, kThreads), kThreads, 0, impl_->stream>>>(partials, left,
                                                                                merged);
    std::swap(partials, merged);
    left = threads;
  }
  impl_->fetch(partials, sizeof(Stats));
  merge(stats, *static_cast<const Stats*>(impl_->pinned));
}

std::uint64_t DeviceStats::digest_of(const std::byte* data, std::size_t bytes, std::uint64_t seed) {
  const auto size = static_cast<std::int64_t>(bytes);
  if (size <= device::kShortDigestBytes) {
    if (size > 0) impl_->fetch(data, bytes);
    return isoshard::digest_of(static_cast<const std::byte*>(impl_->pinned), bytes, seed);
  }
  const DigestSecret secret = device::digest_secret(seed);
  const std::int64_t threads = device::num_digest_blocks(size) * kAccumulators;
  auto* const digest = reinterpret_cast<std::uint64_t*>(impl_->scratch_of(8 * (threads + 1)));
  std::uint64_t* const sums = digest + 1;
  if (threads > 0)
    sum_kernel<<<blocks_for(threads, kThreads), kThreads, 0, impl_->stream>>>(data, threads, secret,
                                                                              sums);
  chain_kernel<<<1, static_cast<unsigned>(kAccumulators), 0, impl_->stream>>>(data, size, secret,
                                                                              sums, digest);
  impl_->fetch(digest, sizeof(*digest));
  return *static_cast<const std::uint64_t*>(impl_->pinned);
}

bool has_device_stats() noexcept {
  return true;
}

}  // namespace isoshard
