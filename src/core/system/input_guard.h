// SPDX-License-Identifier: Apache-2.0
/// Mapped input files that another program shortens: the fault becomes pages of zeros and a mark.
#pragma once
#include <cstddef>

namespace isoshard::detail {

/// Reading a mapped page behind the end of its file raises SIGBUS. From the first call on, such a
/// fault in one of the guarded ranges puts zeros in the place of that page and of those behind it,
/// marks the range as lost, and goes on. So whoever reads a guarded range must ask is_lost()
/// before the result is believed. Any other SIGBUS goes to the handler that was there before.
///
/// Returns the number of the range, or -1 if as many as can be are guarded already.
[[nodiscard]] int guard_range(const std::byte* begin, std::size_t size) noexcept;
void unguard_range(int range) noexcept;
[[nodiscard]] bool is_lost(int range) noexcept;

/// For handlers of SIGBUS that are installed later: true if `address` lies in a guarded range,
/// which was mended. Safe in a signal handler.
[[nodiscard]] bool mend_guarded_range(const void* address) noexcept;

}  // namespace isoshard::detail
