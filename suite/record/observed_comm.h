// SPDX-License-Identifier: Apache-2.0
/// A communicator whose every call somebody sees, with those of the groups that are split from it.
#pragma once
#include <functional>
#include <memory>

#include "core/comm/collective.h"
#include "core/comm/communicator.h"

namespace isoshard {

/// `call` has op, purpose, axis, dtype, reduction (of calls that reduce) and count; `group_size` is
/// that of the group that was called.
using CallObserver = std::function<void(const CollectiveCall& call, int group_size)>;

/// Tells `observer` of every call before it is made.
[[nodiscard]] std::unique_ptr<Communicator> observed(Communicator& inner, CallObserver observer);
[[nodiscard]] std::unique_ptr<Communicator> observed(std::unique_ptr<Communicator> inner,
                                                     CallObserver observer);

}  // namespace isoshard
