// SPDX-License-Identifier: Apache-2.0
/// What a communicator says that stands before another one and touches no data.
#pragma once
#include "core/comm/communicator.h"

namespace isoshard {

/// A communicator that hands its callers' buffers to another one as they are: it logs calls, or
/// times them. So whatever memory the other one takes, it takes, too.
class PassesOn {
 public:
  virtual ~PassesOn() = default;
  [[nodiscard]] virtual const Communicator& below() const noexcept = 0;
};

}  // namespace isoshard
