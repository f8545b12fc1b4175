// SPDX-License-Identifier: Apache-2.0
/// Reports of ranks and worlds as bytes, for processes that share no memory.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "harness/world/world.h"

namespace isoshard {

/// All of a rank's report, and the FileError that it met (WorldReport::file_error).
[[nodiscard]] std::vector<std::byte> message_of(const RankReport& report,
                                                const std::string& file_error);
/// Errors   ProtocolError if the bytes are cut off.
[[nodiscard]] RankReport rank_report_of(std::span<const std::byte> message,
                                        std::string& file_error);

[[nodiscard]] std::vector<std::byte> message_of(const WorldReport& report);
/// Errors   ProtocolError if the bytes are cut off.
[[nodiscard]] WorldReport world_report_of(std::span<const std::byte> message);

}  // namespace isoshard
