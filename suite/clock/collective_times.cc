// SPDX-License-Identifier: Apache-2.0
// A slot of numbers for each rank.
#include "suite/clock/collective_times.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/base/error.h"
#include "suite/clock/metered_comm.h"

namespace isoshard {
std::vector<ReportCollective> purpose_rows(std::span<const PurposeTimes> ranks, double steps,
                                           bool has_hidden) {
  const auto count = static_cast<double>(ranks.size());
  std::vector<ReportCollective> rows;
  for (int p = 0; p < kNumPurposes; ++p) {
    ReportCollective row;
    row.purpose = name_of(static_cast<Purpose>(p));
    std::vector<double> medians;
    double hidden = 0;
    for (const PurposeTimes& rank : ranks) {
      const PurposeTotals& own = rank[static_cast<std::size_t>(p)];
      if (own.calls == 0) continue;
      row.calls_per_rank += static_cast<double>(own.calls) / count / steps;
      row.bytes += static_cast<double>(own.bytes) / steps;
      row.seconds_per_rank += own.seconds / count / steps;
      hidden += own.hidden / count / steps;
      medians.push_back(own.median);
    }
    if (medians.empty()) continue;
    row.median_call_seconds = median_of(std::move(medians));
    if (has_hidden) row.hidden_seconds_per_rank = hidden;
    rows.push_back(std::move(row));
  }
  return rows;
}

CollectiveTimes::CollectiveTimes(int num_ranks) : num_ranks_(num_ranks) {
  static_assert(std::is_trivially_copyable_v<Slot>);
  const std::size_t bytes = static_cast<std::size_t>(num_ranks) * sizeof(Slot);
  void* const at =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED)
    throw InfrastructureError(
        fmt::format("no shared memory of {} bytes for times: {}", bytes, std::strerror(errno)));
  slots_ = static_cast<Slot*>(at);
  std::uninitialized_value_construct_n(slots_, num_ranks);
}

CollectiveTimes::~CollectiveTimes() {
  ::munmap(slots_, static_cast<std::size_t>(num_ranks_) * sizeof(Slot));
}

CommDecorator CollectiveTimes::metering(CommDecorator decorate) {
  return [this, decorate = std::move(decorate)](std::unique_ptr<Communicator> inner, int rank) {
    clock_ = std::make_unique<StepClock>();
    slots_[rank].has_hidden = knows_what_is_under_way(*inner);
    std::unique_ptr<Communicator> timed = metered(std::move(inner), *clock_);
    return decorate ? decorate(std::move(timed), rank) : std::move(timed);
  };
}

void CollectiveTimes::begin_step(int /*rank*/) {
  if (clock_ != nullptr) clock_->begin_step();
}

void CollectiveTimes::end_step(int rank) {
  if (clock_ == nullptr) return;
  (void)clock_->end_step();
  slots_[rank].purposes = clock_->purposes();
  ++slots_[rank].steps;
}

std::vector<ReportCollective> CollectiveTimes::rows(Launcher& launcher) const {
  std::vector<Slot> slots(slots_, slots_ + num_ranks_);
  if (Peers* const peers = launcher.peers(); peers != nullptr) {
    // ranks are processes with memory of their own: rank r is process r
    Slot own;
    if (peers->index() < num_ranks_) own = slots_[peers->index()];
    std::vector<Slot> all(static_cast<std::size_t>(peers->count()));
    peers->gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
    // a world of one rank is forked from process 0, which then shares this memory with it
    all.resize(static_cast<std::size_t>(num_ranks_));
    slots = std::move(all);
  }
  const bool was_measured = std::ranges::all_of(
      slots, [&](const Slot& slot) { return slot.steps > 0 && slot.steps == slots.front().steps; });
  if (!was_measured) return {};
  std::vector<PurposeTimes> ranks;
  for (const Slot& slot : slots) ranks.push_back(slot.purposes);
  return purpose_rows(ranks, static_cast<double>(slots.front().steps), slots.front().has_hidden);
}

}  // namespace isoshard
