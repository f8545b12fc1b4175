// SPDX-License-Identifier: Apache-2.0
/// Random bits that depend on (seed, parameter name, flat index) and on nothing else.
///
/// Source   J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC11, section 3.3
///          (Philox4x32-10).
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

namespace isoshard {

using PhiloxCounter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

inline constexpr int kPhiloxRounds = 10;

[[nodiscard]] [[gnu::always_inline]] constexpr PhiloxCounter philox_round(PhiloxCounter counter,
                                                                          PhiloxKey key) noexcept {
  const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * counter[0];
  const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * counter[2];
  return {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
          static_cast<std::uint32_t>(product1),
          static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
          static_cast<std::uint32_t>(product0)};
}

[[nodiscard]] [[gnu::always_inline]] constexpr PhiloxKey next_key(PhiloxKey key) noexcept {
  return {key[0] + 0x9E3779B9U, key[1] + 0xBB67AE85U};
}

/// The block of four words that belongs to a counter: ten rounds. Different counters give different
/// blocks.
[[nodiscard]] constexpr PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) noexcept {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    counter = philox_round(counter, key);
    key = next_key(key);
  }
  return counter;
}

/// FNV-1a, 64 bits: a short published hash that no library version can change.
[[nodiscard]] constexpr std::uint64_t fnv1a_64(std::string_view text) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001b3U;
  }
  return hash;
}

/// The bits of one named tensor. The key is the hash of the name; the counter is (index / 2, seed),
/// so that two seeds of one name never share a block. Each block of 128 bits serves two
/// neighboring indices.
class RandomStream {
 public:
  constexpr RandomStream(std::uint64_t seed, std::string_view name) noexcept
      : seed_(seed), hash_(fnv1a_64(name)) {}

  /// The 64-bit words of indices 2 * pair and 2 * pair + 1.
  [[nodiscard]] constexpr std::array<std::uint64_t, 2> pair(
      std::uint64_t pair_index) const noexcept {
    const PhiloxCounter words = philox4x32(
        {low(pair_index), high(pair_index), low(seed_), high(seed_)}, {low(hash_), high(hash_)});
    return {join(words[0], words[1]), join(words[2], words[3])};
  }

  /// pair(first + i) for i < Count: the first words to `even`, the second ones to `odd`. Round by
  /// round over all, for vector code.
  template <std::size_t Count>
  [[gnu::always_inline]] constexpr void pairs(std::uint64_t first, std::uint64_t (&even)[Count],
                                              std::uint64_t (&odd)[Count]) const noexcept {
    std::uint32_t c0[Count], c1[Count], c2[Count], c3[Count];
    for (std::size_t i = 0; i < Count; ++i) {
      c0[i] = low(first + i);
      c1[i] = high(first + i);
      c2[i] = low(seed_);
      c3[i] = high(seed_);
    }
    PhiloxKey key = {low(hash_), high(hash_)};
    for (int round = 0; round < kPhiloxRounds; ++round) {
      for (std::size_t i = 0; i < Count; ++i) {
        const PhiloxCounter next = philox_round({c0[i], c1[i], c2[i], c3[i]}, key);
        c0[i] = next[0];
        c1[i] = next[1];
        c2[i] = next[2];
        c3[i] = next[3];
      }
      key = next_key(key);
    }
    for (std::size_t i = 0; i < Count; ++i) {
      even[i] = join(c0[i], c1[i]);
      odd[i] = join(c2[i], c3[i]);
    }
  }

  [[nodiscard]] constexpr std::uint64_t bits(std::uint64_t index) const noexcept {
    return pair(index / 2)[index % 2];
  }

 private:
  static constexpr std::uint32_t low(std::uint64_t value) noexcept {
    return static_cast<std::uint32_t>(value);
  }
  static constexpr std::uint32_t high(std::uint64_t value) noexcept {
    return static_cast<std::uint32_t>(value >> 32);
  }
  static constexpr std::uint64_t join(std::uint32_t lower, std::uint32_t upper) noexcept {
    return (std::uint64_t{upper} << 32) | lower;
  }

  std::uint64_t seed_;
  std::uint64_t hash_;
};

/// 64 random bits.
/// Determinism   a pure function of its arguments, the same on every machine.
[[nodiscard]] constexpr std::uint64_t random_bits(std::uint64_t seed, std::string_view name,
                                                  std::uint64_t index) noexcept {
  return RandomStream(seed, name).bits(index);
}

}  // namespace isoshard
