// SPDX-License-Identifier: Apache-2.0
/// What MPI needs besides to know a group: tags, and a communicator of its own for order native.
#pragma once
#include <mpi.h>

#include "core/comm/control/comm_group.h"

namespace isoshard {

/// Of data: collectives and transfers of one group do not meet. Below number_for().
struct MpiTags {
  [[nodiscard]] static int number_for(int world_size) noexcept {
    return static_cast<int>(2 * kMaxGroups) * world_size;
  }
  [[nodiscard]] static int of_collectives(const CommGroup& group) noexcept {
    return static_cast<int>(2 * group.index);
  }
  [[nodiscard]] static int of_transfers(const CommGroup& group) noexcept {
    return static_cast<int>(2 * group.index + 1);
  }
};
static_assert(kMaxGroups * kMaxRanks < 1U << 31, "tags are int");

}  // namespace isoshard
