// SPDX-License-Identifier: Apache-2.0
/// staged() for the devices that LibTorch has in this process.
#pragma once
#include <memory>

#include "core/comm/communicator.h"

namespace isoshard {

/// `inner` for tensors of any device (see staged). Copies are LibTorch's, on the stream that is
/// current, and wait for it: what was enqueued there before is in them.
[[nodiscard]] std::unique_ptr<Communicator> staged_tensors(Communicator& inner);

}  // namespace isoshard
