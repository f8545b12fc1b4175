// SPDX-License-Identifier: Apache-2.0
// The state of the sources, which cmake/BuildState.cmake writes down in every build.
#include "harness/golden/build_info.h"

#include <fmt/format.h>

#include <build_state.inc>

namespace isoshard {

BuildInfo build_info() {
  return {ISOSHARD_BUILD_COMMIT, ISOSHARD_BUILD_STATE, ISOSHARD_BUILD_SANITIZERS};
}

std::string unfit_for_goldens(const BuildInfo& build) {
  if (!build.sanitizers.empty())
    return fmt::format("it was recorded by a build with the sanitizers {}", build.sanitizers);
  if (build.state == "clean") return "";
  if (build.state == "dirty")
    return fmt::format(
        "it was recorded by a build of sources that were changed after commit {}: commit them, "
        "build, record again",
        build.commit.substr(0, 12));
  return "it was recorded by a build whose sources are not under version control, so nobody can "
         "reproduce it";
}

}  // namespace isoshard
