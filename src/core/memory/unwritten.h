// SPDX-License-Identifier: Apache-2.0
/// What memory holds that nobody has written: bits that no right result has.
///
/// A tensor that a subject forgets to write would else hold what was there before. With zeros, or
/// with the values of the run before, that may be just what is right.
#pragma once
#include <cstddef>
#include <cstdint>

namespace isoshard {

/// How many words there are: as many runs in a row have words of their own.
inline constexpr std::uint64_t kUnwrittenWords = 29;

/// 16 bits for the memory of the run with this number. Repeated, they are a NaN in bf16, fp16, fp32
/// and fp64 alike, and in integers numbers that no index or count has.
///
/// Returns   0x7FF1 to 0x7FFF and 0xFFF1 to 0xFFFE (0xFFFF would be the integer -1); runs whose
///           numbers differ by less than kUnwrittenWords have different ones.
[[nodiscard]] std::uint16_t unwritten_word(std::uint64_t run) noexcept;

/// Whether it is one of these words.
[[nodiscard]] bool is_unwritten_word(std::uint16_t word) noexcept;

/// Repeats `word` over `bytes`; the last byte of an odd count is the word's first.
void fill_unwritten(std::byte* data, std::size_t bytes, std::uint16_t word) noexcept;

}  // namespace isoshard
