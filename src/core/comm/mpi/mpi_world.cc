// SPDX-License-Identifier: Apache-2.0
/// The world as its processes hold it, and attach_mpi_world.
#include "core/comm/mpi/mpi_world.h"

#include <fmt/format.h>

#include <cstdlib>
#include <utility>

#include "core/base/error.h"
#include "core/comm/backend.h"
#include "core/comm/mpi/launcher.h"
#include "core/comm/mpi/mpi_communicator.h"
#include "core/comm/mpi/mpi_job.h"

namespace isoshard {

class MpiWorld::Impl {
 public:
  explicit Impl(ReductionOrder order) : rank(std::make_shared<MpiRank>(order)) {}
  std::shared_ptr<MpiRank> rank;
};

MpiWorld::MpiWorld(ReductionOrder order) : impl_(std::make_unique<Impl>(order)) {}
MpiWorld::~MpiWorld() = default;

int MpiWorld::size() const noexcept {
  return impl_->rank->endpoint.size();
}

int MpiWorld::rank() const noexcept {
  return impl_->rank->endpoint.rank();
}

std::unique_ptr<Communicator> MpiWorld::communicator(int rank) {
  if (rank != this->rank()) {
    throw UsageError(fmt::format(
        "a process of an MPI world has the communicator of its own rank {} only, got {}",
        this->rank(), rank));
  }
  return std::make_unique<MpiCommunicator>(impl_->rank);
}

void MpiWorld::abort(std::string_view reason) noexcept {
  impl_->rank->endpoint.abort(MpiEndpoint::AbortKind::kFailure, reason);
}

bool MpiWorld::is_aborted() const noexcept {
  return impl_->rank->endpoint.is_aborted();
}

void MpiWorld::set_deadline(std::chrono::steady_clock::time_point deadline) noexcept {
  impl_->rank->endpoint.set_deadline(deadline);
}

void MpiWorld::set_patience(std::optional<std::chrono::milliseconds> patience) noexcept {
  impl_->rank->endpoint.set_patience(patience);
}

void MpiWorld::serve() {
  impl_->rank->endpoint.serve();
}

void MpiWorld::set_idle(std::function<void()> idle) {
  impl_->rank->endpoint.set_idle(std::move(idle));
}

const Journal& MpiWorld::journal() const noexcept {
  return impl_->rank->endpoint.journal();
}

std::uint64_t MpiWorld::gather_journals(std::uint64_t word) {
  return impl_->rank->endpoint.gather_journals(word);
}

std::unique_ptr<Communicator> attach_mpi_world(const AttachOptions& options) {
  start_mpi();
  int rank = 0, size = 1;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  check_attached_world([](const char* name) { return std::getenv(name); }, rank, size,
                       options.expected_size);
  auto world = std::make_shared<MpiRank>(options.order);
  world->endpoint.ends_process_in_abort();
  if (options.deadline) world->endpoint.set_deadline(*options.deadline);
  return std::make_unique<MpiCommunicator>(std::move(world));
}

std::string_view why_mpi_is_not_built() noexcept {
  return {};
}

}  // namespace isoshard
