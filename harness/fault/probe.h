// SPDX-License-Identifier: Apache-2.0
/// Counts, across forked processes, how often a fault had an effect. A fault that never had one
/// proves nothing.
#pragma once
#include <cstdint>
#include <memory>

namespace isoshard {

/// Made by the controller before the fork; copies count into the same shared memory.
/// Errors   InfrastructureError if no shared memory can be had.
class FaultProbe {
 public:
  FaultProbe();
  void fired() const noexcept;
  [[nodiscard]] std::int64_t count() const noexcept;

 private:
  std::shared_ptr<void> counter_;
};

}  // namespace isoshard
