// SPDX-License-Identifier: Apache-2.0
/// What the test worlds of backends have in common whose ranks are processes that run the same
/// tests.
#pragma once
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/journal.h"

namespace isoshard {

/// A world of all processes, with the interface of ThreadWorld, so that tests run on both. World is
/// MpiWorld or NcclWorld.
///
/// Guarantees   a world that the subclass has not made runs nothing. When run() returns, all ranks
///              have, the journal is exact for all ranks, and a test that failed on one rank has
///              failed on all.
template <class World>
class ProcessTestWorld {
 public:
  /// How often run() has run a body in this process.
  [[nodiscard]] static int num_runs() { return num_runs_; }

  /// Runs body on this process's rank, waits for the others, and rethrows what body throws, which
  /// also aborts the world.
  void run(const std::function<void(Communicator&)>& body) {
    if (!world_) return;
    ++num_runs_;
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
    if (failed_anywhere && !has_failed) ADD_FAILURE() << "another rank failed; " << where_it_is_;
  }

  void set_deadline(std::chrono::steady_clock::time_point deadline) noexcept {
    if (world_) world_->set_deadline(deadline);
  }
  [[nodiscard]] bool is_aborted() const noexcept { return world_ && world_->is_aborted(); }
  [[nodiscard]] const Journal& journal() const noexcept {
    return world_ ? world_->journal() : empty_;
  }

 protected:
  /// `where_it_is`: where a reader finds what another rank printed.
  explicit ProcessTestWorld(std::string where_it_is)
      : where_it_is_(std::move(where_it_is)),
        empty_memory_(Journal::bytes(1) + 64),
        empty_(
            [this] {
              void* begin = empty_memory_.data();
              std::size_t space = empty_memory_.size();
              return static_cast<std::byte*>(std::align(64, Journal::bytes(1), begin, space));
            }(),
            1) {}
  ~ProcessTestWorld() = default;

  std::optional<World> world_;  ///< none if the size is another one
  std::unique_ptr<Communicator> communicator_;

 private:
  static inline int num_runs_ = 0;
  std::string where_it_is_;
  std::vector<std::byte> empty_memory_;
  Journal empty_;
};

}  // namespace isoshard
