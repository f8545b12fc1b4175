// SPDX-License-Identifier: Apache-2.0
// Square products, each size for some tens of milliseconds.
#include "suite/bench/gemm_ceiling.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <cstring>
#include <span>

#include "core/tensor/convert.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {
namespace {

constexpr std::int64_t kSizes[] = {128, 256, 512, 1024};
constexpr double kSecondsASize = 0.02;
/// Above the second size none is tried whose single product would take longer.
constexpr double kLongestProduct = 0.06;

double seconds_from(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double flops_of(std::int64_t size) {
  return 2.0 * static_cast<double>(size) * static_cast<double>(size) * static_cast<double>(size);
}

/// Both layouts of the right matrix, as kernels differ by it.
void try_size(std::int64_t size, Dtype dtype, GemmCeiling& best) {
  const auto options = at::TensorOptions().dtype(scalar_type_of(dtype));
  const at::Tensor a = at::ones({size, size}, options), b = at::ones({size, size}, options);
  for (const at::Tensor& right : {b, b.t()}) {
    at::Tensor product = at::mm(a, right);
    for (double spent = 0; spent < kSecondsASize;) {
      const auto start = std::chrono::steady_clock::now();
      at::mm_out(product, a, right);
      const double seconds = seconds_from(start);
      spent += seconds;
      if (flops_of(size) / seconds <= best.flops_per_second) continue;
      best.flops_per_second = flops_of(size) / seconds;
      best.size = size;
    }
  }
}

}  // namespace

GemmCeiling measure_gemm_ceiling(Dtype dtype, int threads) {
  WorldOptions options;
  options.name = "products of matrices";
  options.process_name = "iso:gemm";
  const WorldReport report = run_forked(std::move(options), [&](Rank& rank) {
    at::set_num_threads(threads);
    GemmCeiling best;
    best.threads = threads;
    for (const std::int64_t size : kSizes) {
      if (size > kSizes[1] && flops_of(size) > kLongestProduct * best.flops_per_second) break;
      try_size(size, dtype, best);
    }
    rank.post_result(std::as_bytes(std::span(&best, 1)));
  });
  require_ok(report);
  GemmCeiling best;
  std::memcpy(&best, report.ranks[0].result.data(), sizeof(best));
  return best;
}

}  // namespace isoshard
