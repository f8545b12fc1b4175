// SPDX-License-Identifier: Apache-2.0
// Signs from blocks of Philox, sums in fp64.
#include "harness/golden/projections.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/base/philox.h"

namespace isoshard {
namespace {

constexpr std::size_t kPerBlock = 16;  // elements that one block of 128 bits serves, 8 bits each
constexpr int kStepBits = 9;
// Each of 8 numbers is off by half a step, and a step is at most 2^-9 of what is allowed: their
// distance is at most sqrt(8) / 2 x 2^-9 of it, less than 2^-8.
constexpr double kWiden = 1 + 0x1p-8;
constexpr double kMostSteps = 0x1p53;

}  // namespace

void add_projections(Projections& sums, std::string_view tensor, int rank,
                     std::span<const double> elements) noexcept {
  const RandomStream stream(static_cast<std::uint64_t>(rank), tensor);
  for (std::size_t begin = 0; begin < elements.size(); begin += kPerBlock) {
    const auto words = stream.pair(begin / kPerBlock);
    const std::size_t count = std::min(kPerBlock, elements.size() - begin);
    for (std::size_t i = 0; i < count; ++i) {
      const double element = elements[begin + i];
      const auto signs = static_cast<unsigned>(words[i / 8] >> (8 * (i % 8)));
      for (unsigned j = 0; j < kProjections; ++j)
        sums[j] += ((signs >> j) & 1U) != 0 ? element : -element;
    }
  }
}

double distance_of(const Projections& a, const Projections& b) noexcept {
  double sum = 0;
  for (std::size_t j = 0; j < kProjections; ++j) sum += (a[j] - b[j]) * (a[j] - b[j]);
  return std::sqrt(sum);
}

double step_of(double allowed) noexcept {
  return std::ldexp(1, std::ilogb(allowed) - kStepBits);
}

std::optional<StoredProjections> stored(const Projections& exact, double allowed) noexcept {
  if (!(allowed > 0) || !std::isfinite(allowed)) return std::nullopt;
  StoredProjections result{{}, allowed * kWiden};
  const double step = step_of(result.allowed);
  for (std::size_t j = 0; j < kProjections; ++j) {
    const double steps = std::nearbyint(exact[j] / step);
    if (!(std::fabs(steps) < kMostSteps)) return std::nullopt;
    result.values[j] = steps * step;
  }
  return result;
}

}  // namespace isoshard
