// SPDX-License-Identifier: Apache-2.0
// Normal quantiles from a table of polynomials, tools/make_normal_table.py.
#include "core/random/normal.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <vector>

#include "core/base/philox.h"

namespace isoshard {
namespace {

// The octave of p is its number of leading zeros; the three bits after its leading one pick the
// part of the octave; the rest is the place s in the part.
constexpr int kSegmentBits = 3;
constexpr int kDegree = 5;
constexpr double kTable[std::size_t{64} << kSegmentBits][kDegree + 1] = {
#include "core/random/normal_table.inc"
};

[[gnu::always_inline]] inline double quantile(std::uint64_t bits) noexcept {
  const std::uint64_t m = bits | 1U;
  const int octave = std::countl_zero(m);
  const std::uint64_t fraction = (m << octave) << 1;  // without the leading one
  const std::size_t segment = static_cast<std::size_t>(fraction >> (64 - kSegmentBits));
  // 52 bits: those of a number from 1 to 2, so that s is exact
  const std::uint64_t place = (fraction << kSegmentBits) >> 12;
  const double s = std::bit_cast<double>(place | std::bit_cast<std::uint64_t>(1.0)) - 1.5;
  const double(&c)[kDegree + 1] =
      kTable[(static_cast<std::size_t>(octave) << kSegmentBits) + segment];
  // Estrin's scheme: a fixed association with a shorter chain than Horner's.
  const double s2 = s * s;
  const double z = ((c[0] + c[1] * s) + (c[2] + c[3] * s) * s2) + (c[4] + c[5] * s) * (s2 * s2);
  return std::bit_cast<double>(std::bit_cast<std::uint64_t>(z) ^ (bits << 63));
}

struct Draw {
  RandomStream stream;
  double mean, std;

  [[nodiscard, gnu::always_inline]] float value(std::uint64_t bits) const noexcept {
    return static_cast<float>(mean + std * quantile(bits));
  }
};

constexpr std::size_t kPairsPerBlock = 64;

// One stage after the other over a block, so that a compiler makes vector code of each. + - x round
// alike in vectors and alone.
[[gnu::always_inline]] inline void fill_blocks(std::span<float> out, const Draw& draw,
                                               std::uint64_t first_pair) noexcept {
  std::uint64_t words[2][kPairsPerBlock];
  for (std::size_t done = 0; done < out.size(); done += 2 * kPairsPerBlock) {
    draw.stream.pairs<kPairsPerBlock>(first_pair + done / 2, words[0], words[1]);
    float* const block = out.data() + done;
    for (std::size_t i = 0; i < kPairsPerBlock; ++i) {
      block[2 * i] = draw.value(words[0][i]);
      block[2 * i + 1] = draw.value(words[1][i]);
    }
  }
}

using FillBlocks = void (*)(std::span<float>, const Draw&, std::uint64_t) noexcept;

void fill_anywhere(std::span<float> out, const Draw& draw, std::uint64_t first_pair) noexcept {
  fill_blocks(out, draw, first_pair);
}

#if defined(__x86_64__)
[[gnu::target("avx512f,avx512dq,avx512cd,avx512vl,avx512bw,prefer-vector-width=512")]] void
fill_avx512(std::span<float> out, const Draw& draw, std::uint64_t first_pair) noexcept {
  fill_blocks(out, draw, first_pair);
}

[[gnu::target("avx2,bmi2")]] void fill_avx2(std::span<float> out, const Draw& draw,
                                            std::uint64_t first_pair) noexcept {
  fill_blocks(out, draw, first_pair);
}

#endif

// Slowest first.
const std::vector<FillBlocks>& loops() noexcept {
  static const std::vector<FillBlocks> all = [] {
    std::vector<FillBlocks> known{fill_anywhere};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2"))
      known.push_back(fill_avx2);
    if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
      known.push_back(fill_avx512);
#endif
    return known;
  }();
  return all;
}

}  // namespace

double normal_of_bits(std::uint64_t bits) noexcept {
  return quantile(bits);
}

double standard_normal(std::uint64_t seed, std::string_view name,
                       std::uint64_t flat_index) noexcept {
  return quantile(random_bits(seed, name, flat_index));
}

void fill_normal(std::span<float> out, std::uint64_t seed, std::string_view name,
                 std::uint64_t first_index, double mean, double std) noexcept {
  detail::fill_normal_with(detail::num_normal_loops() - 1, out, seed, name, first_index, mean, std);
}

namespace detail {

std::size_t num_normal_loops() noexcept {
  return loops().size();
}

void fill_normal_with(std::size_t loop, std::span<float> out, std::uint64_t seed,
                      std::string_view name, std::uint64_t first_index, double mean,
                      double std) noexcept {
  const Draw draw{RandomStream(seed, name), mean, std};
  std::size_t i = 0;
  if (first_index % 2 == 1 && !out.empty()) out[i++] = draw.value(draw.stream.bits(first_index));
  const std::size_t in_blocks = (out.size() - i) / (2 * kPairsPerBlock) * (2 * kPairsPerBlock);
  loops()[loop](out.subspan(i, in_blocks), draw, (first_index + i) / 2);
  for (i += in_blocks; i < out.size(); ++i) out[i] = draw.value(draw.stream.bits(first_index + i));
}

}  // namespace detail

}  // namespace isoshard
