// SPDX-License-Identifier: Apache-2.0
/// The interface of a rank for the test body or subject that runs on it.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/comm/communicator.h"

namespace isoshard {

/// The object that every rank of a world passes to its body.
class Rank {
 public:
  virtual ~Rank() = default;
  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  /// The world's communicator, decorated by WorldOptions::decorate if given. One per rank, lives as
  /// long as the body.
  [[nodiscard]] virtual Communicator& comm() noexcept = 0;
  /// Sends this rank's result to the controller (RankReport::result). Call it at most once.
  virtual void post_result(std::span<const std::byte> bytes) = 0;
  /// Sets the phase of the rank ("setup", "forward", ...), which a report names when the rank
  /// fails.
  virtual void set_phase(std::string_view phase) noexcept = 0;
};

}  // namespace isoshard
