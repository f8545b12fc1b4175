// SPDX-License-Identifier: Apache-2.0
/// Ranks that ask each other about their hosts, clocks and links.
#pragma once
#include <string>

#include "app/cluster/cluster.h"
#include "harness/world/launcher.h"

namespace isoshard {

/// Of the host that this process runs on. `mpi` is what MPI calls itself.
[[nodiscard]] HostFacts facts_of_this_host(std::string mpi);

/// Runs a world of `num_ranks` that measures: offsets of clocks, and links of each two hosts (by
/// their first ranks) and inside each host, one link of a host at a time.
///
/// Ranks    with Launcher::peers collective over them; all get the same cluster. `own` is that of
///          the calling process, on forked ranks of all.
/// Errors   InfrastructureError that says how a rank failed, or that a sum over all ranks was
/// wrong.
[[nodiscard]] Cluster probe_cluster(Launcher& launcher, int num_ranks, const HostFacts& own);

}  // namespace isoshard
