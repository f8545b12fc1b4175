// SPDX-License-Identifier: Apache-2.0
/// What a rank needs around it where its tensors are on a device.
#pragma once
#include <memory>
#include <optional>

#include "core/comm/communicator.h"
#include "core/tensor/pinned_settings.h"
#include "fixtures/cases/case.h"

namespace isoshard {

/// While it lives the process's settings are the case's, and comm() takes tensors of its device. On
/// a CPU it does nothing.
///
/// Ranks    local; one at a time in a process.
/// Errors   as SettingsPin.
class DeviceRank {
 public:
  DeviceRank(const Case& c, Communicator& world);
  /// That of the world; where it does not take tensors of the device, staged through host memory.
  [[nodiscard]] Communicator& comm() noexcept { return staged_ == nullptr ? *world_ : *staged_; }
  /// After a run: what was pinned at its start held.   Errors   as SettingsPin::check.
  void check() const;

 private:
  Communicator* world_;
  std::optional<SettingsPin> pin_;
  std::unique_ptr<Communicator> staged_;
};

}  // namespace isoshard
