// SPDX-License-Identifier: Apache-2.0
// Coordinates along the axes of a sum.
#include "harness/verdict/parts/held.h"

namespace isoshard::detail {

std::vector<int> summand_of(const Layout& layout, const MeshShape& mesh, int rank) {
  std::vector<int> summand;
  for (const Placement& p : layout.placements)
    if (p.kind == Placement::Kind::kPartial) summand.push_back(mesh.coordinate(rank, p.axis));
  return summand;
}

}  // namespace isoshard::detail
