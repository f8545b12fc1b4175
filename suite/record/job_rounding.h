// SPDX-License-Identifier: Apache-2.0
/// Whether the processes that judge together round alike: those of one job may have other CPUs.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "harness/world/launcher.h"

namespace isoshard {

/// What one process says of its rounding.
struct ProcessRounding {
  std::uint64_t digest = 0;  ///< arithmetic_digest()
  std::string host;
  std::string cpu;
};

struct JobRounding {
  /// Of process 0 where all round alike; otherwise one that no CPU has.
  std::uint64_t digest = 0;
  /// Empty where all round alike; otherwise who does not round as process 0, and what follows.
  std::string difference;
};

[[nodiscard]] JobRounding job_rounding(const std::vector<ProcessRounding>& processes);

/// That of the processes of the launcher (Launcher::peers), or of this one. Asked once.
/// Ranks   with peers, the first call is collective over them.
[[nodiscard]] const JobRounding& rounding_of_job(Launcher& launcher);

/// Its difference. Without peers nothing is computed.
[[nodiscard]] std::string difference_in_rounding(Launcher& launcher);

/// What of the runs since the last call several hosts computed and did not get alike, a line for
/// each: a result that cannot be repeated. Nothing of hosts whose CPUs round otherwise: that is
/// told as such.
/// Ranks   with peers, collective over them.
[[nodiscard]] std::vector<std::string> unequal_runs_of_hosts(Launcher& launcher);

}  // namespace isoshard
