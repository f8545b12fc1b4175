// SPDX-License-Identifier: Apache-2.0
/// What a test body or subject sees of the rank it runs on.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/comm/communicator.h"

namespace isoshard {

/// Handed to the body that every rank of a world runs.
class Rank {
 public:
  virtual ~Rank() = default;
  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  /// The world's communicator, decorated by WorldOptions::decorate if given. One per rank, lives as
  /// long as the body.
  [[nodiscard]] virtual Communicator& comm() noexcept = 0;
  /// Sends this rank's result to the controller (RankReport::result). At most once; replaces
  /// nothing if never called.
  virtual void post_result(std::span<const std::byte> bytes) = 0;
  /// Tells the controller what the rank is at ("setup", "forward", ...): named in a report when the
  /// rank fails.
  virtual void set_phase(std::string_view phase) noexcept = 0;
};

}  // namespace isoshard
