// SPDX-License-Identifier: Apache-2.0
/// What kernels are told, made where the CPU is.
#define XXH_INLINE_ALL  // shows XXH3's secret
#include <xxhash.h>

#include <cstring>
#include <iterator>

#include "harness/stats/device/comparing.h"
#include "harness/stats/device/digesting.h"

namespace isoshard::device {

Comparing comparing(const std::byte* reference, Dtype reference_dtype, const std::byte* actual,
                    Dtype actual_dtype, std::int64_t count, std::int64_t index, double grad_scale,
                    const std::uint8_t* selected) noexcept {
  // Elements of a block that is wide anyway; which it is in decides nothing but the order of sums.
  constexpr std::int64_t kWideBlock = 4096;
  Comparing run;
  run.reference = reference;
  run.actual = actual;
  run.selected = selected;
  run.reference_dtype = reference_dtype;
  run.actual_dtype = actual_dtype;
  run.reference_size = static_cast<int>(size_of(reference_dtype));
  run.actual_size = static_cast<int>(size_of(actual_dtype));
  run.count = count;
  run.index = index;
  run.grad_scale = grad_scale;
  run.steps = steps_of(reference_dtype, actual_dtype);
  run.is_narrow = reference_dtype == actual_dtype && grad_scale == 1.0 && selected == nullptr &&
                  (reference_dtype == Dtype::kFloat32 || reference_dtype == Dtype::kBFloat16);
  run.is_integers =
      !is_floating(reference_dtype) && !is_floating(actual_dtype) && grad_scale == 1.0;
  run.block = run.is_narrow ? kStatsBlockBytes / run.reference_size : kWideBlock;
  return run;
}

DigestSecret digest_secret(std::uint64_t seed) noexcept {
  DigestSecret secret;
  static_assert(sizeof(secret) == sizeof(XXH3_kSecret));
  std::memcpy(secret.words, XXH3_kSecret, sizeof(secret));
  for (std::size_t word = 0; word < std::size(secret.words); word += 2) {
    secret.words[word] += seed;
    secret.words[word + 1] -= seed;
  }
  return secret;
}

}  // namespace isoshard::device
