// SPDX-License-Identifier: Apache-2.0
/// The sources that this program was built from, as recorded by the build.
#pragma once
#include <string>

namespace isoshard {

struct BuildInfo {
  std::string commit;  ///< 40 hex digits; empty: the sources are not under version control
  /// "clean", "dirty" (a tracked file but goldens and pages differed from the commit) or "unknown"
  std::string state;
  std::string sanitizers;  ///< "address,undefined"; empty: none
};

[[nodiscard]] BuildInfo build_info();

/// Why numbers of such a build cannot become a golden; empty if they can.
[[nodiscard]] std::string unfit_for_goldens(const BuildInfo& build);

}  // namespace isoshard
