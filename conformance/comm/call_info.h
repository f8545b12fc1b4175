// SPDX-License-Identifier: Apache-2.0
/// What the calls of these tests say that they are for.
#pragma once
#include "core/comm/communicator.h"

namespace isoshard {

inline constexpr CallInfo kInfo{Purpose::kGradReduce, Axis::kDp};

}  // namespace isoshard
