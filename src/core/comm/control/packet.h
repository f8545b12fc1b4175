// SPDX-License-Identifier: Apache-2.0
/// Packets between ranks that are processes, as bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/comm/collective.h"
#include "core/comm/journal.h"

namespace isoshard {

enum class PacketKind : std::uint8_t {
  kCall,         ///< the announcement of a collective
  kTransfer,     ///< the header of a send
  kWhereabouts,  ///< where a waiting rank is
  kAbort,
  kGo,       ///< the receiver of a transfer has come; nccl only
  kLane,     ///< all that a rank's lane of the journal holds; nccl only
  kGoodbye,  ///< the sender makes no more calls; nccl only
};

/// All ranks run the same program, so numbers travel as they lie in memory.
struct Packet {
  PacketKind kind = PacketKind::kCall;
  JournalEntry entry{};                       ///< the call, and the group as world ranks
  std::int32_t color = 0;                     ///< split
  std::int32_t key = 0;                       ///< split
  std::uint32_t groups_led = 0;               ///< split: of the sender; kAbort: the kind of abort
  std::vector<std::int64_t> counts{};         ///< as AnnouncedCall
  std::vector<std::int64_t> output_counts{};  ///< as AnnouncedCall
  /// Small data that travel along, a rank's whereabouts, or the reason of an abort
  std::vector<std::byte> data{};
};

[[nodiscard]] std::shared_ptr<const std::vector<std::byte>> encode(const Packet& packet);
/// Errors   InfrastructureError for bytes that encode() did not make.
[[nodiscard]] Packet decode(std::span<const std::byte> bytes);

}  // namespace isoshard
