// SPDX-License-Identifier: Apache-2.0
/// A world's region in private memory, and the threads that are its ranks.
#include "core/comm/thread/thread_world.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/comm/region/region.h"
#include "core/comm/region/region_communicator.h"

namespace isoshard {
namespace {

class PrivateMemory {
 public:
  explicit PrivateMemory(std::size_t capacity) : capacity_(capacity) {
    void* const data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED)
      throw InfrastructureError(std::string("the memory of a thread world cannot be mapped: ") +
                                std::strerror(errno));
    data_ = static_cast<std::byte*>(data);
  }
  ~PrivateMemory() { munmap(data_, capacity_); }
  PrivateMemory(const PrivateMemory&) = delete;
  PrivateMemory& operator=(const PrivateMemory&) = delete;

  [[nodiscard]] RegionMemory memory() const {
    return {data_, capacity_, [](std::size_t, std::size_t) {}};
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t capacity_;
};

std::string what_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace

class ThreadWorld::Impl {
 public:
  Impl(int num_ranks, ReductionOrder order)
      : memory(WorldRegion::capacity_for(num_ranks)), region(memory.memory(), num_ranks, order) {
    for (int rank = 0; rank < num_ranks; ++rank)
      communicators.push_back(std::make_unique<RegionCommunicator>(region, rank));
  }

  void run_rank(int rank, const std::function<void(Communicator&)>& body) {
    try {
      body(*communicators[static_cast<std::size_t>(rank)]);
    } catch (...) {
      {
        const std::lock_guard lock(mutex);
        if (first_failure) return;
        first_failure = std::current_exception();
      }
      region.abort(rank, WorldRegion::AbortKind::kFailure,
                   "rank " + std::to_string(rank) + " failed: " + what_of(first_failure));
    }
  }

  PrivateMemory memory;
  WorldRegion region;
  std::vector<std::unique_ptr<Communicator>> communicators;
  std::mutex mutex;
  std::exception_ptr first_failure;
};

ThreadWorld::ThreadWorld(int num_ranks, ReductionOrder order)
    : impl_(std::make_unique<Impl>(num_ranks, order)) {}
ThreadWorld::~ThreadWorld() = default;

int ThreadWorld::size() const noexcept {
  return impl_->region.num_ranks();
}

std::unique_ptr<Communicator> ThreadWorld::communicator(int rank) {
  if (rank < 0 || rank >= size())
    throw UsageError("rank " + std::to_string(rank) + " of a world of " + std::to_string(size()) +
                     " ranks");
  return std::make_unique<RegionCommunicator>(impl_->region, rank);
}

void ThreadWorld::run(const std::function<void(Communicator&)>& body) {
  if (impl_->region.is_aborted()) impl_->region.throw_abort();
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([this, rank, &body] { impl_->run_rank(rank, body); });
    }
  }
  if (impl_->first_failure) std::rethrow_exception(impl_->first_failure);
}

void ThreadWorld::abort(std::string_view reason) noexcept {
  impl_->region.abort(size(), WorldRegion::AbortKind::kFailure, reason);
}

bool ThreadWorld::is_aborted() const noexcept {
  return impl_->region.is_aborted();
}

void ThreadWorld::set_deadline(std::chrono::steady_clock::time_point deadline) noexcept {
  impl_->region.set_deadline(deadline);
}

const Journal& ThreadWorld::journal() const noexcept {
  return impl_->region.journal();
}

Transport thread_transport() {
  return {Backend::kThread, false, [](int num_ranks, ReductionOrder order) {
            return std::make_unique<ThreadWorld>(num_ranks, order);
          }};
}

}  // namespace isoshard
