// SPDX-License-Identifier: Apache-2.0
// Splits of the world by coordinates.
#include "subjects/parallel/nd/nd_groups.h"

#include <fmt/format.h>

#include "core/base/error.h"

namespace isoshard {

NdGroups::NdGroups(Mesh& mesh, int dp_replicate) {
  const int dp = mesh.degree(Axis::kDp), cp = mesh.degree(Axis::kCp);
  if (dp_replicate < 1 || dp % dp_replicate != 0) {
    throw UsageError(
        fmt::format("dp must be a multiple of dp_replicate {}, got {}", dp_replicate, dp));
  }
  const int dp_shard = dp / dp_replicate;
  const int replica = mesh.coordinate(Axis::kDp) / dp_shard;
  const int place = mesh.coordinate(Axis::kDp) * cp + mesh.coordinate(Axis::kCp);
  const int block =
      mesh.coordinate(Axis::kPp) * mesh.degree(Axis::kTp) + mesh.coordinate(Axis::kTp);
  data_ = mesh.world().split(block, place);
  shards_ = mesh.world().split(block * dp_replicate + replica, place);
  context_ =
      mesh.world().split(block * dp + mesh.coordinate(Axis::kDp), mesh.coordinate(Axis::kCp));
  pipeline_ = mesh.world().split(place * mesh.degree(Axis::kTp) + mesh.coordinate(Axis::kTp),
                                 mesh.coordinate(Axis::kPp));
  replicas_ = mesh.world().split(block * dp_shard * cp + place % (dp_shard * cp), replica);
}

}  // namespace isoshard
