// SPDX-License-Identifier: Apache-2.0
// Settings and staging of one rank.
#include "suite/reference/device_rank.h"

#include "core/comm/staged/staged_tensors.h"
#include "fixtures/cases/device_settings.h"

namespace isoshard {

DeviceRank::DeviceRank(const Case& c, Communicator& world) : world_(&world) {
  if (c.device == Device::Kind::kCpu) return;
  pin_.emplace(device_settings_of(c));
  staged_ = staged_tensors(world);
}

void DeviceRank::check() const {
  if (pin_.has_value()) pin_->check();
}

}  // namespace isoshard
