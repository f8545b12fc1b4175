// SPDX-License-Identifier: Apache-2.0
/// A world's region in a memfd.
#include "core/comm/shm/shm_world.h"

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/comm/region/region.h"
#include "core/comm/region/region_communicator.h"
#include "core/comm/shm/shm_region.h"

namespace isoshard {

class ShmWorld::Impl {
 public:
  Impl(int num_ranks, ReductionOrder order)
      : memory(WorldRegion::capacity_for(num_ranks)), region(memory.memory(), num_ranks, order) {}

  ShmRegion memory;
  WorldRegion region;
};

ShmWorld::ShmWorld(int num_ranks, ReductionOrder order)
    : impl_(std::make_unique<Impl>(num_ranks, order)) {}
ShmWorld::~ShmWorld() = default;

int ShmWorld::size() const noexcept {
  return impl_->region.num_ranks();
}

std::unique_ptr<Communicator> ShmWorld::communicator(int rank) {
  if (rank < 0 || rank >= size())
    throw UsageError(fmt::format("the rank must be from 0 to {}, got {}", size() - 1, rank));
  return std::make_unique<RegionCommunicator>(impl_->region, rank);
}

void ShmWorld::abort(std::string_view reason) noexcept {
  impl_->region.abort(size(), WorldRegion::AbortKind::kFailure, reason);
}

bool ShmWorld::is_aborted() const noexcept {
  return impl_->region.is_aborted();
}

void ShmWorld::set_deadline(std::chrono::steady_clock::time_point deadline) noexcept {
  impl_->region.set_deadline(deadline);
}

const Journal& ShmWorld::journal() const noexcept {
  return impl_->region.journal();
}

Transport shm_transport() {
  return {Backend::kShm, true, [](int num_ranks, ReductionOrder order) {
            return std::make_unique<ShmWorld>(num_ranks, order);
          }};
}

}  // namespace isoshard
