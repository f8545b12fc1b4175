// SPDX-License-Identifier: Apache-2.0
// Dropout bits, block by block.
#include "core/random/keep_bits.h"

#include <vector>

#include "core/base/philox.h"

namespace isoshard {
namespace {

constexpr std::size_t kPerPair = 4, kPairsPerBlock = 64, kPerBlock = kPerPair * kPairsPerBlock;

struct Draw {
  RandomStream stream;
  std::uint64_t threshold;  // of 32 bits

  [[nodiscard, gnu::always_inline]] std::uint8_t kept(std::uint64_t word) const noexcept {
    return static_cast<std::uint8_t>((word & 0xFFFFFFFFU) >= threshold);
  }
  [[nodiscard]] std::uint8_t kept_at(std::uint64_t index) const noexcept {
    const std::uint64_t word = stream.pair(index / kPerPair)[index % kPerPair / 2];
    return kept(index % 2 == 0 ? word : word >> 32);
  }
};

[[gnu::always_inline]] inline void fill_blocks(std::span<std::uint8_t> out, const Draw& draw,
                                               std::uint64_t first_pair) noexcept {
  std::uint64_t even[kPairsPerBlock], odd[kPairsPerBlock];
  for (std::size_t done = 0; done < out.size(); done += kPerBlock) {
    draw.stream.pairs<kPairsPerBlock>(first_pair + done / kPerPair, even, odd);
    std::uint8_t* const block = out.data() + done;
    for (std::size_t i = 0; i < kPairsPerBlock; ++i) {
      block[4 * i] = draw.kept(even[i]);
      block[4 * i + 1] = draw.kept(even[i] >> 32);
      block[4 * i + 2] = draw.kept(odd[i]);
      block[4 * i + 3] = draw.kept(odd[i] >> 32);
    }
  }
}

using FillBlocks = void (*)(std::span<std::uint8_t>, const Draw&, std::uint64_t) noexcept;

void fill_anywhere(std::span<std::uint8_t> out, const Draw& draw,
                   std::uint64_t first_pair) noexcept {
  fill_blocks(out, draw, first_pair);
}

#if defined(__x86_64__)
[[gnu::target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")]] void fill_avx512(
    std::span<std::uint8_t> out, const Draw& draw, std::uint64_t first_pair) noexcept {
  fill_blocks(out, draw, first_pair);
}

[[gnu::target("avx2")]] void fill_avx2(std::span<std::uint8_t> out, const Draw& draw,
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
    if (__builtin_cpu_supports("avx2")) known.push_back(fill_avx2);
    if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw"))
      known.push_back(fill_avx512);
#endif
    return known;
  }();
  return all;
}

}  // namespace

void fill_keep(std::span<std::uint8_t> out, std::uint64_t seed, std::string_view name,
               std::uint64_t first_index, double drop_rate) noexcept {
  detail::fill_keep_with(detail::num_keep_loops() - 1, out, seed, name, first_index, drop_rate);
}

namespace detail {

std::size_t num_keep_loops() noexcept {
  return loops().size();
}

void fill_keep_with(std::size_t loop, std::span<std::uint8_t> out, std::uint64_t seed,
                    std::string_view name, std::uint64_t first_index, double drop_rate) noexcept {
  const Draw draw{RandomStream(seed, name), static_cast<std::uint64_t>(drop_rate * 0x1p32)};
  std::size_t i = 0;
  for (; i < out.size() && (first_index + i) % kPerPair != 0; ++i)
    out[i] = draw.kept_at(first_index + i);
  const std::size_t in_blocks = (out.size() - i) / kPerBlock * kPerBlock;
  loops()[loop](out.subspan(i, in_blocks), draw, (first_index + i) / kPerPair);
  for (i += in_blocks; i < out.size(); ++i) out[i] = draw.kept_at(first_index + i);
}

}  // namespace detail

}  // namespace isoshard
