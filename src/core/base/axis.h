// SPDX-License-Identifier: Apache-2.0
/// The axes of a device mesh.
#pragma once
#include <cstdint>
#include <iosfwd>
#include <string_view>

namespace isoshard {

/// kWorld stands for all ranks at once (no axis in particular). kDpReplicate and kDpShard are the
/// two halves of a dp axis whose parameters are copied over one and sharded over the other; bundles
/// of other programs have them, and no subject of this project.
enum class Axis : std::uint8_t { kWorld, kDp, kTp, kPp, kCp, kEp, kDpReplicate, kDpShard };

/// world, dp, tp, pp, cp, ep, dp_replicate, dp_shard.
[[nodiscard]] std::string_view name_of(Axis axis) noexcept;
/// The same, in messages of GoogleTest.
void PrintTo(Axis axis, std::ostream* out);

/// Errors   UsageError that lists the names.
[[nodiscard]] Axis parse_axis(std::string_view name);

}  // namespace isoshard
