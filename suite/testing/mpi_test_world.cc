// SPDX-License-Identifier: Apache-2.0
/// Runs of a body on every process, and the agreement after each.
#include "suite/testing/mpi_test_world.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>
#include <exception>

#include "core/comm/mpi/launcher.h"
#include "core/comm/mpi/mpi_job.h"

namespace isoshard {
namespace {

int runs = 0;

}  // namespace

void MpiTestWorld::attach(int expected_size) {
  start_mpi();
  check_attached_world([](const char* name) { return std::getenv(name); }, attached_rank(),
                       attached_size(), expected_size);
}

int MpiTestWorld::attached_size() {
  int size = 0;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
  return size;
}

int MpiTestWorld::attached_rank() {
  int rank = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  return rank;
}

int MpiTestWorld::num_runs() {
  return runs;
}

MpiTestWorld::MpiTestWorld(int num_ranks, ReductionOrder order)
    : empty_memory_(Journal::bytes(1) + 64),
      empty_(
          [this] {
            void* begin = empty_memory_.data();
            std::size_t space = empty_memory_.size();
            return static_cast<std::byte*>(std::align(64, Journal::bytes(1), begin, space));
          }(),
          1) {
  if (num_ranks != attached_size()) return;
  world_.emplace(order);
  communicator_ = world_->communicator(world_->rank());
}

void MpiTestWorld::run(const std::function<void(Communicator&)>& body) {
  if (!world_) return;
  ++runs;
  std::exception_ptr failure;
  try {
    body(*communicator_);
  } catch (const std::exception& error) {
    failure = std::current_exception();
    world_->abort(fmt::format("rank {} failed: {}", world_->rank(), error.what()));
  }
  const bool has_failed = failure != nullptr || testing::Test::HasFailure();
  const bool failed_anywhere = world_->gather_journals(has_failed ? 1 : 0) != 0;
  if (failure) std::rethrow_exception(failure);
  if (failed_anywhere && !has_failed)
    ADD_FAILURE() << "another rank failed; its lines begin with its number";
}

void MpiTestWorld::set_deadline(std::chrono::steady_clock::time_point deadline) noexcept {
  if (world_) world_->set_deadline(deadline);
}

bool MpiTestWorld::is_aborted() const noexcept {
  return world_ && world_->is_aborted();
}

const Journal& MpiTestWorld::journal() const noexcept {
  return world_ ? world_->journal() : empty_;
}

}  // namespace isoshard
