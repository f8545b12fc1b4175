// SPDX-License-Identifier: Apache-2.0
/// The axes of a device mesh.
#pragma once
#include <cstdint>
#include <string_view>

namespace isoshard {

/// kWorld stands for all ranks at once (no axis in particular).
enum class Axis : std::uint8_t { kWorld, kDp, kTp, kPp, kCp, kEp };

/// world, dp, tp, pp, cp, ep.
[[nodiscard]] std::string_view name_of(Axis axis) noexcept;

/// Errors   UsageError that lists the names.
[[nodiscard]] Axis parse_axis(std::string_view name);

}  // namespace isoshard
