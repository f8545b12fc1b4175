// SPDX-License-Identifier: Apache-2.0
/// Pieces through slots, and who is woken when one is free or full.
#include "core/comm/region/region_channel.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"
#include "core/comm/buffers.h"
#include "core/comm/mismatch.h"
#include "core/comm/region/meeting.h"

namespace isoshard {
namespace {

constexpr std::size_t kSlotBytes = kWindowBytes / kChannelSlots;

}  // namespace

ChannelEnd::ChannelEnd(WorldRegion& region, GroupBlock& block, int world_rank, bool is_sender)
    : region_(&region),
      block_(&block),
      world_rank_(world_rank),
      is_sender_(is_sender),
      is_reserved_(kChannelSlots) {}

std::shared_ptr<Moving> ChannelEnd::add(CollectiveCall call, Buffer data, bool must_be_taken) {
  call.group_id = block_->id;
  call.group_sequence = ++num_messages_;
  region_->journal().promise(world_rank_, call);
  queue_.push_back(
      std::make_shared<Moving>(Moving{.call = call, .data = data, .must_be_taken = must_be_taken}));
  return queue_.back();
}

void ChannelEnd::enter(Moving& moving) {
  if (moving.sequence != 0) return;
  JournalEntry entry;
  entry.call = moving.call;
  entry.group_size = 2;
  for (const int member : {0, 1})
    entry.group_members.insert(block_->world_ranks[static_cast<std::size_t>(member)]);
  moving.sequence = region_->journal().enter(world_rank_, entry);
}

void ChannelEnd::advance() {
  while (!queue_.empty()) {
    Moving& next = *queue_.front();
    while (!next.is_done) {
      if (!move_piece(next)) return;
    }
    queue_.pop_front();
  }
}

std::byte* ChannelEnd::slot(std::uint32_t piece, std::size_t bytes) {
  const std::size_t index = piece % kChannelSlots, begin = index * kSlotBytes;
  if (is_sender_ && bytes > 0 && !is_reserved_[index]) {
    try {
      region_->reserve_window(*block_, 0, begin, begin + kSlotBytes);
    } catch (const InfrastructureError& error) {
      region_->abort(world_rank_, WorldRegion::AbortKind::kFailure,
                     fmt::format("rank {}: {}", world_rank_, error.what()));
      throw;
    }
    is_reserved_[index] = true;
  }
  return region_->window(*block_, 0) + begin;
}

// False if a slot is full, or not yet.
bool ChannelEnd::move_piece(Moving& moving) {
  const std::uint32_t posted = block_->posted.load(std::memory_order_acquire);
  const std::uint32_t taken = block_->taken.load(std::memory_order_acquire);
  if (is_sender_ ? posted - taken == kChannelSlots : posted == taken) return false;
  const std::size_t total = bytes_of(moving.data.count, moving.data.dtype);
  const std::size_t bytes = std::min(kSlotBytes, total - moving.moved_bytes);
  std::byte* const own = moving.data.data + moving.moved_bytes;
  if (is_sender_) {
    copy_bytes(slot(posted, bytes), own, bytes);
    block_->messages[posted % kChannelSlots] = moving.call;
    block_->posted.store(posted + 1, std::memory_order_release);
  } else {
    if (moving.moved_bytes == 0) compare(moving, block_->messages[taken % kChannelSlots]);
    copy_bytes(own, slot(taken, bytes), bytes);
    block_->taken.store(taken + 1, std::memory_order_release);
  }
  region_->ring(block_->world_ranks[is_sender_ ? 1 : 0]);
  moving.moved_bytes += bytes;
  if (moving.moved_bytes < total) return true;
  moving.last_piece = posted;
  moving.is_done = true;
  enter(moving);
  if (!moving.must_be_taken) region_->journal().finish(world_rank_, moving.sequence);
  return true;
}

bool ChannelEnd::is_over(Moving& moving) {
  if (!moving.is_done) return false;
  if (!moving.must_be_taken) return true;
  const std::uint32_t taken = block_->taken.load(std::memory_order_acquire);
  if (static_cast<std::int32_t>(taken - moving.last_piece) <= 0) return false;
  region_->journal().finish(world_rank_, moving.sequence);
  return true;
}

void ChannelEnd::compare(const Moving& expected, const CollectiveCall& sent) {
  if (matches(sent, expected.call)) return;
  region_->abort(world_rank_, WorldRegion::AbortKind::kFailure,
                 describe_mismatch_of_transfer({block_->world_ranks[0], sent},
                                               {block_->world_ranks[1], expected.call}));
  region_->throw_abort();
}

ChannelEnd& RankChannels::add(GroupBlock& block, bool is_sender) {
  ends_.push_back(std::make_unique<ChannelEnd>(*region_, block, world_rank_, is_sender));
  return *ends_.back();
}

bool RankChannels::advance() {
  bool is_left = false;
  for (const auto& end : ends_) {
    end->advance();
    is_left |= !end->is_idle();
  }
  return is_left;
}

bool RankChannels::is_idle() const noexcept {
  return std::ranges::all_of(ends_, [](const auto& end) { return end->is_idle(); });
}

void RankChannels::finish(ChannelEnd& end, Moving& moving) {
  for (;;) {
    const std::uint32_t rung = region_->bell(world_rank_).load(std::memory_order_acquire);
    if ((rung & 1U) != 0) region_->throw_abort();
    advance();
    if (end.is_over(moving)) return;
    end.enter(moving);
    wait_for_bell(*region_, world_rank_, rung);
  }
}

}  // namespace isoshard
