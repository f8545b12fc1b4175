// SPDX-License-Identifier: Apache-2.0
// Normal quantiles from a table of polynomials, tools/make_normal_table.py.
#include "base/normal.h"

#include <bit>
#include <cstddef>

#include "base/philox.h"

namespace isoshard {
namespace {

// The octave of p is its number of leading zeros; the three bits after its leading one pick the part of the octave; the
// rest is the place s in the part.
constexpr int kSegmentBits = 3;
constexpr int kDegree = 5;
constexpr double kTable[std::size_t{64} << kSegmentBits][kDegree + 1] = {
#include "base/normal_table.inc"
};

inline double quantile(std::uint64_t bits) noexcept {
  const std::uint64_t m = bits | 1U;
  const int octave = std::countl_zero(m);
  const std::uint64_t fraction = (m << octave) << 1;  // without the leading one
  const std::size_t segment = static_cast<std::size_t>(fraction >> (64 - kSegmentBits));
  const std::uint64_t place = (fraction << kSegmentBits) >> 12;  // 52 bits, so that the conversion and s are exact
  const double s = static_cast<double>(static_cast<std::int64_t>(place)) * 0x1p-52 - 0.5;
  const double(&c)[kDegree + 1] = kTable[(static_cast<std::size_t>(octave) << kSegmentBits) + segment];
  // Estrin's scheme: a fixed association with a shorter chain than Horner's.
  const double s2 = s * s;
  const double z = ((c[0] + c[1] * s) + (c[2] + c[3] * s) * s2) + (c[4] + c[5] * s) * (s2 * s2);
  return std::bit_cast<double>(std::bit_cast<std::uint64_t>(z) ^ (bits << 63));
}

}  // namespace

double normal_of_bits(std::uint64_t bits) noexcept {
  return quantile(bits);
}

double standard_normal(std::uint64_t seed, std::string_view name, std::uint64_t flat_index) noexcept {
  return quantile(random_bits(seed, name, flat_index));
}

void fill_normal(std::span<float> out, std::uint64_t seed, std::string_view name, std::uint64_t first_index, double mean,
                 double std) noexcept {
  const RandomStream stream(seed, name);
  const auto value = [mean, std](std::uint64_t bits) noexcept { return static_cast<float>(mean + std * quantile(bits)); };
  std::size_t i = 0;
  if (first_index % 2 == 1 && !out.empty()) out[i++] = value(stream.bits(first_index));
  for (; i + 1 < out.size(); i += 2) {
    const auto pair = stream.pair((first_index + i) / 2);
    out[i] = value(pair[0]);
    out[i + 1] = value(pair[1]);
  }
  if (i < out.size()) out[i] = value(stream.bits(first_index + i));
}

}  // namespace isoshard
