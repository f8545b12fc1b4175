// SPDX-License-Identifier: Apache-2.0
/// Waits that watch packets, events and NCCL's errors at once.
#include "core/comm/nccl/nccl_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace isoshard {
namespace {

constexpr std::size_t kSmallestBlock = std::size_t{1} << 20;
constexpr std::size_t kAlignment = 256;

}  // namespace

GpuScratch::~GpuScratch() {
  for (std::byte* block : blocks_) api_->free(block);
}

std::byte* GpuScratch::take(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (used_ + bytes > capacity_) {
    capacity_ = std::max({2 * capacity_, bytes, kSmallestBlock});
    blocks_.push_back(api_->allocate(capacity_));
    used_ = 0;
  }
  return blocks_.back() + std::exchange(used_, used_ + bytes);
}

HostStaging::~HostStaging() {
  for (const auto& [memory, bytes] : all_) api_->free_host(memory);
}

std::byte* HostStaging::take(std::size_t bytes) {
  const auto found = free_.lower_bound(bytes);
  if (found != free_.end()) {
    std::byte* const memory = found->second;
    free_.erase(found);
    return memory;
  }
  const std::size_t rounded = std::bit_ceil(std::max(bytes, kAlignment));
  std::byte* const memory = api_->allocate_host(rounded);
  all_.emplace(memory, rounded);
  return memory;
}

void HostStaging::give_back(std::byte* memory) {
  free_.emplace(all_.at(memory), memory);
}

NcclRank::NcclRank(std::shared_ptr<TcpJob> job, std::shared_ptr<GpuApi> api, int device,
                   ReductionOrder order, const SharedAbort* shared_abort, std::byte* shared_journal)
    : api_(std::move(api)),
      device_(device),
      endpoint_(std::move(job), order, shared_abort, shared_journal),
      scratch_(*api_),
      staging_(*api_),
      transfers_(*this) {
  api_->use_device(device_);
  stream_ = api_->make_stream();
  endpoint_.set_advance([this] { transfers_.advance(); });
}

NcclRank::~NcclRank() {
  endpoint_.set_advance({});
  if (endpoint_.is_aborted()) end_kernels();
  for (NcclComm comm : comms_) api_->destroy_comm(comm);
  for (GpuEvent event : events_) api_->destroy_event(event);
  api_->destroy_stream(stream_);
}

void NcclRank::fail(std::string_view what) {
  const std::string reason = fmt::format("rank {}: {}", endpoint_.rank(), what);
  // whoever was first has said why
  if (!endpoint_.is_aborted()) endpoint_.abort(ControlEndpoint::AbortKind::kFailure, reason);
  end_kernels();
  endpoint_.throw_abort();
}

void NcclRank::abort(std::string_view reason) noexcept {
  endpoint_.abort(ControlEndpoint::AbortKind::kFailure, reason);
  end_kernels();
}

void NcclRank::end_kernels() noexcept {
  for (NcclComm comm : std::exchange(comms_, {})) api_->abort_comm(comm);
}

NcclComm NcclRank::start_comm(const NcclId& id, int size, int rank) {
  return comms_.emplace_back(api_->start_comm(id, size, rank));
}

bool NcclRank::is_ready(NcclComm comm) {
  const NcclState state = api_->state(comm);
  if (state.kind == NcclState::Kind::kFailed) {
    const auto entry = endpoint_.journal().last(endpoint_.rank());
    throw GpuError(fmt::format("NCCL reports in {}: {}",
                               entry ? in_words(entry->call) : "no call yet", state.words));
  }
  return state.kind == NcclState::Kind::kReady;
}

void NcclRank::until_ready(NcclComm comm, const RankSet& members) {
  endpoint_.wait_until([&] { return is_ready(comm); }, /*moves_data=*/true, &members);
}

void NcclRank::until_done(GpuEvent event, NcclComm comm, const RankSet& members) {
  endpoint_.wait_until(
      [&] {
        if (comm != nullptr && endpoint_.is_aborted()) return false;  // its kernels were ended
        return (comm == nullptr || is_ready(comm)) && api_->is_done(event);
      },
      /*moves_data=*/true, &members);
}

GpuEvent NcclRank::take_event() {
  if (events_.empty()) return api_->make_event();
  GpuEvent event = events_.back();
  events_.pop_back();
  return event;
}

}  // namespace isoshard
