// SPDX-License-Identifier: Apache-2.0
/// What `doctor --attach` learns of the hosts of a job, and what of it will trouble a run.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace isoshard {

/// Bytes that `verify` needs, generously.
inline constexpr std::int64_t kEnoughMemory = std::int64_t{2} << 30;

/// "1.5 GiB".
[[nodiscard]] std::string gib(std::int64_t bytes);

/// What a process sees of its host, and of the programs that it runs there.
struct HostFacts {
  std::string host;  ///< its label
  std::string cpu;
  int cores = 1;  ///< that the process may use
  std::int64_t memory_bytes = 0;
  std::int64_t available_bytes = 0;
  std::int64_t shm_bytes = -1;  ///< of /dev/shm, -1: there is none
  std::string arithmetic;       ///< digest of the rounding (fixtures/oracle/arithmetic_digest.h)
  std::string program;          ///< SHA-256 of the executable
  std::string libtorch;
  std::string mpi;
};

/// How far the clock of a rank's host is ahead of that of rank 0, give or take `within_ms`.
struct ClockOffset {
  int rank = 0;
  double ahead_ms = 0;
  double within_ms = 0;
};

/// What two ranks have between them.
struct Link {
  int from = 0;
  int to = 0;
  double latency_us = 0;  ///< one way, half of a round trip
  double mib_per_s = 0;   ///< one way at a time
};

struct Cluster {
  std::vector<HostFacts> ranks;     ///< by rank
  std::vector<ClockOffset> clocks;  ///< of the first rank of each host but rank 0's
  std::vector<Link> links;          ///< of each two hosts, and inside each host
};

/// A label for each host of a job, by the number of its host: the name; where several have one
/// name, as containers may, "NAME (1)", "NAME (2)", ...
[[nodiscard]] std::vector<std::string> host_labels(const std::vector<std::string>& names);

/// Ranks by host, hosts in the order of their first ranks.
[[nodiscard]] std::vector<std::vector<int>> ranks_by_host(const std::vector<std::string>& hosts);

/// One table: a line for each host, then one for each link, of many the slowest.
[[nodiscard]] std::string cluster_table(const Cluster& cluster);

/// A sentence for each difference that a run will meet, which says what to do.
[[nodiscard]] std::vector<std::string> cluster_findings(const Cluster& cluster);

}  // namespace isoshard
