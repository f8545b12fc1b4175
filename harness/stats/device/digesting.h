// SPDX-License-Identifier: Apache-2.0
/// XXH3-64 of bytes on a GPU: the values of digest_of(), by the parts of the hash that know no
/// order and the part that does.
///
/// XXH3 of more than 240 bytes keeps eight 64-bit accumulators. A *stripe* is 64 bytes; what it
/// adds to the accumulators depends on its bytes and on its place among the 16 stripes of a *block*
/// (1024 bytes) alone, and sums mod 2^64 know no order. After each whole block the accumulators are
/// *scrambled*, which is not linear: that is a chain over blocks. So every block's eight sums are
/// taken in parallel, by one thread each (64 bytes written for 1024 read), and eight threads walk
/// the chain over these sums. Up to 240 bytes are hashed where the CPU is.
///
/// Source   https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, "XXH3 Algorithm"
#pragma once
#include <cstddef>
#include <cstdint>

#include "harness/stats/device/execution.h"

namespace isoshard::device {

inline constexpr std::int64_t kStripeBytes = 64, kDigestBlockBytes = 1024;
inline constexpr std::int64_t kStripesOfBlock = kDigestBlockBytes / kStripeBytes;
inline constexpr std::int64_t kAccumulators = 8;
/// Up to so many bytes XXH3 is another algorithm, which no kernel has.
inline constexpr std::int64_t kShortDigestBytes = 240;

/// XXH3's secret, changed by a seed: 192 bytes.
struct DigestSecret {
  static constexpr std::int64_t kBytes = 192;
  std::uint64_t words[kBytes / 8];

  /// The 8 bytes at any offset, little-endian.
  [[nodiscard]] ISOSHARD_HOST_DEVICE std::uint64_t at(std::int64_t offset) const {
    const std::int64_t shift = offset % 8 * 8;
    const std::uint64_t low = words[offset / 8] >> shift;
    return shift == 0 ? low : low | words[offset / 8 + 1] << (64 - shift);
  }
};
/// Of the secret that the library xxhash has.
[[nodiscard]] DigestSecret digest_secret(std::uint64_t seed) noexcept;

/// Whole blocks that are scrambled: the last byte belongs to none.
[[nodiscard]] ISOSHARD_HOST_DEVICE inline std::int64_t num_digest_blocks(std::int64_t bytes) {
  return (bytes - 1) / kDigestBlockBytes;
}

namespace detail {

/// What one stripe adds to accumulator `lane`, with the secret from `offset` on.
ISOSHARD_HOST_DEVICE inline std::uint64_t of_stripe(const std::byte* stripe, std::int64_t lane,
                                                    const DigestSecret& secret,
                                                    std::int64_t offset) {
  const std::uint64_t key = load<std::uint64_t>(stripe + 8 * lane) ^ secret.at(offset + 8 * lane);
  return load<std::uint64_t>(stripe + 8 * (lane ^ 1)) + (key & 0xffffffffU) * (key >> 32);
}

/// Both halves of a 128-bit product, one on the other.
ISOSHARD_HOST_DEVICE inline std::uint64_t folded_product(std::uint64_t a, std::uint64_t b) {
#if defined(__CUDA_ARCH__)
  return (a * b) ^ __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
#endif
}

}  // namespace detail

/// What the first `stripes` stripes of a block add to one accumulator.
ISOSHARD_HOST_DEVICE inline std::uint64_t sum_of_stripes(const std::byte* block,
                                                         std::int64_t stripes, std::int64_t lane,
                                                         const DigestSecret& secret) {
  std::uint64_t sum = 0;
  ISOSHARD_UNROLL
  for (std::int64_t stripe = 0; stripe < stripes; ++stripe)
    sum += detail::of_stripe(block + stripe * kStripeBytes, lane, secret, 8 * stripe);
  return sum;
}

/// Thread `thread` of the first kernel: one accumulator's sum over one whole block, at
/// sums[thread]. There are kAccumulators x num_digest_blocks threads.
ISOSHARD_HOST_DEVICE inline void sum_block(std::int64_t thread, const std::byte* data,
                                           const DigestSecret& secret, std::uint64_t* sums) {
  sums[thread] = sum_of_stripes(data + thread / kAccumulators * kDigestBlockBytes, kStripesOfBlock,
                                thread % kAccumulators, secret);
}

/// Thread `lane` of the second kernel: its accumulator after the chain over all blocks and the
/// stripes behind them.
/// Requires   bytes > kShortDigestBytes; sums as sum_block left them.
ISOSHARD_HOST_DEVICE inline std::uint64_t chained(std::int64_t lane, const std::byte* data,
                                                  std::int64_t bytes, const DigestSecret& secret,
                                                  const std::uint64_t* sums) {
  constexpr std::uint64_t kPrimes[kAccumulators] = {
      0xC2B2AE3DULL,         0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL, 0x165667B19E3779F9ULL,
      0x85EBCA77C2B2AE63ULL, 0x85EBCA77ULL,         0x27D4EB2F165667C5ULL, 0x9E3779B1ULL};
  constexpr std::uint64_t kPrime = 0x9E3779B1U;
  const std::int64_t blocks = num_digest_blocks(bytes);
  const std::uint64_t key = secret.at(DigestSecret::kBytes - kStripeBytes + 8 * lane);
  std::uint64_t accumulator = kPrimes[lane];
  ISOSHARD_UNROLL
  for (std::int64_t block = 0; block < blocks; ++block) {
    accumulator += sums[block * kAccumulators + lane];
    accumulator = (accumulator ^ accumulator >> 47 ^ key) * kPrime;
  }
  const std::byte* const rest = data + blocks * kDigestBlockBytes;
  const std::int64_t stripes = (bytes - 1 - blocks * kDigestBlockBytes) / kStripeBytes;
  accumulator += sum_of_stripes(rest, stripes, lane, secret);
  // the last stripe ends with the bytes, and has a place of its own in the secret
  return accumulator + detail::of_stripe(data + bytes - kStripeBytes, lane, secret,
                                         DigestSecret::kBytes - kStripeBytes - 7);
}

/// The digest of the accumulators.
ISOSHARD_HOST_DEVICE inline std::uint64_t digest_of_accumulators(const std::uint64_t* accumulators,
                                                                 std::int64_t bytes,
                                                                 const DigestSecret& secret) {
  constexpr std::int64_t kMergeOffset = 11;
  std::uint64_t result = static_cast<std::uint64_t>(bytes) * 0x9E3779B185EBCA87ULL;
  for (std::int64_t pair = 0; pair < kAccumulators / 2; ++pair) {
    result += detail::folded_product(
        accumulators[2 * pair] ^ secret.at(kMergeOffset + 16 * pair),
        accumulators[2 * pair + 1] ^ secret.at(kMergeOffset + 16 * pair + 8));
  }
  result = (result ^ result >> 37) * 0x165667919E3779F9ULL;
  return result ^ result >> 32;
}

}  // namespace isoshard::device
