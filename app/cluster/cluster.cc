// SPDX-License-Identifier: Apache-2.0
/// The table, and what is compared with what: hosts with rank 0's, links with the best of their
/// kind.
#include "app/cluster/cluster.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace isoshard {
namespace {

constexpr std::size_t kDigits = 12;  ///< of a digest, for people
constexpr std::size_t kLinksShown = 12;
/// OpenMPI keeps 4 MiB a rank there, and more for large messages.
constexpr std::int64_t kShmPerRank = std::int64_t{16} << 20;
/// Times in reports and logs are told in seconds.
constexpr double kClockTolerance_ms = 500;
/// Slower than the best of its kind by more than load explains.
constexpr double kSlowLink = 8;

std::string short_digest(const std::string& digest) {
  return digest.substr(0, kDigits);
}

std::string speed(double mib_per_s) {
  return mib_per_s >= 1024 ? fmt::format("{:.1f} GiB/s", mib_per_s / 1024)
                           : fmt::format("{:.1f} MiB/s", mib_per_s);
}

/// "0-3", "0, 2, 5".
std::string ranks_in_words(const std::vector<int>& ranks) {
  const bool is_range =
      ranks.size() > 2 && ranks.back() - ranks.front() + 1 == static_cast<int>(ranks.size());
  return is_range ? fmt::format("{}-{}", ranks.front(), ranks.back())
                  : fmt::format("{}", fmt::join(ranks, ", "));
}

std::vector<std::vector<int>> hosts_of(const Cluster& cluster) {
  std::vector<std::string> names;
  for (const HostFacts& rank : cluster.ranks) names.push_back(rank.host);
  return ranks_by_host(names);
}

const HostFacts& facts_of(const Cluster& cluster, int rank) {
  return cluster.ranks[static_cast<std::size_t>(rank)];
}

const ClockOffset* clock_of(const Cluster& cluster, int rank) {
  const auto found = std::ranges::find(cluster.clocks, rank, &ClockOffset::rank);
  return found == cluster.clocks.end() ? nullptr : &*found;
}

std::string clock_in_words(const ClockOffset* clock) {
  return clock == nullptr ? "-"
                          : fmt::format("{:+.1f} +- {:.1f} ms", clock->ahead_ms, clock->within_ms);
}

std::string link_in_words(const Cluster& cluster, const Link& link) {
  const std::string& from = facts_of(cluster, link.from).host;
  const std::string& to = facts_of(cluster, link.to).host;
  return from == to ? "within " + from : from + " - " + to;
}

bool is_within_host(const Cluster& cluster, const Link& link) {
  return facts_of(cluster, link.from).host == facts_of(cluster, link.to).host;
}

std::string aligned(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i)
      line += fmt::format("{:<{}}", row[i], i + 1 < row.size() ? widths[i] + 2 : 0);
    text += line + "\n";
  }
  return text;
}

/// What must be equal everywhere, and what to do where it is not.
struct Equal {
  std::function<std::string(const HostFacts&)> of;
  std::string_view what;
  std::string_view advice;
};

std::vector<Equal> what_must_be_equal() {
  return {
      {[](const HostFacts& facts) { return short_digest(facts.program); },
       "another isoshard (SHA-256 of the executable)",
       "put the same program on every host, or use one container image"},
      {[](const HostFacts& facts) { return facts.libtorch; }, "another LibTorch",
       "install the same LibTorch on every host"},
      {[](const HostFacts& facts) { return facts.mpi; }, "another MPI",
       "install the same MPI on every host"},
      {[](const HostFacts& facts) { return short_digest(facts.arithmetic); },
       "a CPU that rounds otherwise (arithmetic digest)",
       "take hosts with one type of CPU; verify judges such a job within tolerances, not bit by "
       "bit"}};
}

void compare_facts(const Cluster& cluster, std::vector<std::string>& findings) {
  const HostFacts& first = cluster.ranks.front();
  for (const Equal& equal : what_must_be_equal()) {
    const std::string expected = equal.of(first);
    for (const std::vector<int>& ranks : hosts_of(cluster)) {
      std::vector<int> other;
      std::ranges::copy_if(ranks, std::back_inserter(other),
                           [&](int rank) { return equal.of(facts_of(cluster, rank)) != expected; });
      if (other.empty()) continue;
      const HostFacts& facts = facts_of(cluster, other.front());
      findings.push_back(fmt::format("{} (rank{} {}) has {}: {}, where {} has {}; {}", facts.host,
                                     other.size() == 1 ? "" : "s", ranks_in_words(other),
                                     equal.what, equal.of(facts), first.host, expected,
                                     equal.advice));
    }
  }
}

void check_host(const Cluster& cluster, const std::vector<int>& ranks,
                std::vector<std::string>& findings) {
  const HostFacts& facts = facts_of(cluster, ranks.front());
  const auto needed = kShmPerRank * static_cast<std::int64_t>(ranks.size());
  if (ranks.size() > 1 && facts.shm_bytes < needed) {
    findings.push_back(fmt::format(
        "/dev/shm of {} must have {:.2f} GiB for its {} ranks, got {}; mount a larger "
        "one (docker run --shm-size, Kubernetes emptyDir with medium Memory), or keep "
        "MPI off it (mpirun --mca btl ^vader)",
        facts.host, static_cast<double>(needed) / (1 << 30), ranks.size(), gib(facts.shm_bytes)));
  }
  if (facts.available_bytes > 0 && facts.available_bytes < kEnoughMemory) {
    findings.push_back(fmt::format(
        "{} must have {} of memory available, got {}; give its ranks another host, or fewer",
        facts.host, gib(kEnoughMemory), gib(facts.available_bytes)));
  }
  const ClockOffset* const clock = clock_of(cluster, ranks.front());
  if (clock != nullptr && std::abs(clock->ahead_ms) - clock->within_ms > kClockTolerance_ms) {
    findings.push_back(fmt::format(
        "the clock of {} must be that of {}, got one {:.1f} s {} (within {:.1f} s); let chronyd or "
        "ntpd set it, or the times in logs and files cannot be put in order",
        facts.host, cluster.ranks.front().host, std::abs(clock->ahead_ms) / 1000,
        clock->ahead_ms > 0 ? "ahead" : "behind", clock->within_ms / 1000));
  }
}

void compare_links(const Cluster& cluster, std::vector<std::string>& findings) {
  for (const bool within : {false, true}) {
    double best = 0;
    for (const Link& link : cluster.links) {
      if (is_within_host(cluster, link) == within) best = std::max(best, link.mib_per_s);
    }
    for (const Link& link : cluster.links) {
      if (is_within_host(cluster, link) != within || link.mib_per_s * kSlowLink >= best) continue;
      findings.push_back(fmt::format(
          "{} must be about as fast as the best link of its kind, {}, got {}; look at that network "
          "card or at what else runs there, or name the network (mpirun --mca btl_tcp_if_include)",
          link_in_words(cluster, link), speed(best), speed(link.mib_per_s)));
    }
  }
}

}  // namespace

std::string gib(std::int64_t bytes) {
  return bytes < 0 ? "none" : fmt::format("{:.1f} GiB", static_cast<double>(bytes) / (1 << 30));
}

std::vector<std::string> host_labels(const std::vector<std::string>& names) {
  std::vector<std::string> labels;
  for (std::size_t host = 0; host < names.size(); ++host) {
    const auto end = names.begin() + static_cast<std::ptrdiff_t>(host);
    const auto before = std::count(names.begin(), end, names[host]);
    const bool is_only = std::ranges::count(names, names[host]) == 1;
    labels.push_back(is_only ? names[host] : fmt::format("{} ({})", names[host], before + 1));
  }
  return labels;
}

std::vector<std::vector<int>> ranks_by_host(const std::vector<std::string>& hosts) {
  std::vector<std::string> names;
  std::vector<std::vector<int>> ranks;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto known = std::ranges::find(names, hosts[rank]);
    const auto index = static_cast<std::size_t>(known - names.begin());
    if (known == names.end()) {
      names.push_back(hosts[rank]);
      ranks.emplace_back();
    }
    ranks[index].push_back(static_cast<int>(rank));
  }
  return ranks;
}

std::string cluster_table(const Cluster& cluster) {
  std::vector<std::vector<std::string>> hosts = {{"host", "ranks", "cores", "memory", "/dev/shm",
                                                  "arithmetic", "clock", "isoshard", "libtorch",
                                                  "mpi", "cpu"}};
  for (const std::vector<int>& ranks : hosts_of(cluster)) {
    const HostFacts& facts = facts_of(cluster, ranks.front());
    hosts.push_back({facts.host, ranks_in_words(ranks), fmt::format("{}", facts.cores),
                     gib(facts.memory_bytes), gib(facts.shm_bytes), short_digest(facts.arithmetic),
                     clock_in_words(clock_of(cluster, ranks.front())), short_digest(facts.program),
                     facts.libtorch, facts.mpi, facts.cpu});
  }
  std::string text = aligned(hosts);
  if (cluster.links.empty()) return text;
  std::vector<Link> links = cluster.links;
  std::ranges::stable_sort(links, {}, &Link::mib_per_s);
  std::vector<std::vector<std::string>> rows = {{"link", "ranks", "one way", "bandwidth"}};
  for (std::size_t i = 0; i < std::min(links.size(), kLinksShown); ++i) {
    rows.push_back({link_in_words(cluster, links[i]),
                    fmt::format("{}, {}", links[i].from, links[i].to),
                    fmt::format("{:.1f} us", links[i].latency_us), speed(links[i].mib_per_s)});
  }
  text += aligned(rows);
  if (links.size() > kLinksShown)
    text += fmt::format("and {} faster links\n", links.size() - kLinksShown);
  return text;
}

std::vector<std::string> cluster_findings(const Cluster& cluster) {
  std::vector<std::string> findings;
  compare_facts(cluster, findings);
  for (const std::vector<int>& ranks : hosts_of(cluster)) check_host(cluster, ranks, findings);
  compare_links(cluster, findings);
  return findings;
}

}  // namespace isoshard
