// SPDX-License-Identifier: Apache-2.0
/// Which elements of a named tensor a dropout keeps: the choice is the same, element by element, on
/// every machine and for every split of the tensor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace isoshard {

/// out[i] = 1 if element first_index + i is kept, 0 if it is dropped, which happens with
/// probability `drop_rate`.
///
/// Every element has 32 bits of RandomStream(seed, name) (four neighbors share a block) and is
/// dropped if they are below floor(drop_rate x 2^32).
/// Requires      0 <= drop_rate < 1.
/// Determinism   a pure function of seed, name, index and rate: any split of a range into parts
///               gives the same bits.
void fill_keep(std::span<std::uint8_t> out, std::uint64_t seed, std::string_view name,
               std::uint64_t first_index, double drop_rate) noexcept;

namespace detail {
/// The number of loops that this CPU can run. All give the same results. The first one runs on any
/// CPU, and fill_keep uses the last one.
[[nodiscard]] std::size_t num_keep_loops() noexcept;
void fill_keep_with(std::size_t loop, std::span<std::uint8_t> out, std::uint64_t seed,
                    std::string_view name, std::uint64_t first_index, double drop_rate) noexcept;
}  // namespace detail

}  // namespace isoshard
