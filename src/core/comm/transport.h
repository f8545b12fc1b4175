// SPDX-License-Identifier: Apache-2.0
/// How the ranks of a world talk, for those who start them: one factory a backend.
#pragma once
#include <functional>
#include <memory>
#include <string_view>

#include "core/comm/backend.h"
#include "core/comm/communicator.h"
#include "core/comm/journal.h"

namespace isoshard {

/// What the ranks of one world talk through, as the process that starts them holds it.
///
/// Requires     lives as long as any communicator of it, in every process.
/// Guarantees   the journal is readable at any time, and after the ranks are gone.
class CommWorld {
 public:
  virtual ~CommWorld() = default;
  [[nodiscard]] virtual int size() const noexcept = 0;
  /// The world's communicator of one rank.
  /// Ranks   local; called once, where the rank runs.
  [[nodiscard]] virtual std::unique_ptr<Communicator> communicator(int rank) = 0;
  /// Makes every rank's pending and later collectives throw CommError(reason). The first reason
  /// given stays.
  virtual void abort(std::string_view reason) noexcept = 0;
  [[nodiscard]] virtual const Journal& journal() const noexcept = 0;
};

/// A way to make such worlds. A backend has a function that returns its own: shm_transport()
/// (core/comm/shm/shm_world.h), thread_transport() (core/comm/thread/thread_world.h).
struct Transport {
  Backend backend = Backend::kShm;
  /// Whether ranks may be processes; otherwise they are threads of the process that makes the
  /// world.
  bool crosses_processes = true;
  /// Called before the ranks start. Empty: the launcher's usual transport.
  std::function<std::unique_ptr<CommWorld>(int num_ranks, ReductionOrder order)> make = {};
};

}  // namespace isoshard
