// SPDX-License-Identifier: Apache-2.0
/// One number of every process; names only where numbers differ.
#include "suite/record/job_rounding.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <span>
#include <utility>

#include "fixtures/oracle/arithmetic_digest.h"
#include "harness/world/attached/last_words.h"
#include "harness/world/machine.h"

namespace isoshard {
namespace {

/// As it is sent.
struct Sent {
  std::uint64_t digest = 0;
  std::array<char, 128> host{};
  std::array<char, 128> cpu{};
};

template <std::size_t size>
void copy_text(std::array<char, size>& to, const std::string& text) {
  std::memcpy(to.data(), text.data(), std::min(text.size(), size - 1));
}

JobRounding ask(Launcher& launcher) {
  const std::uint64_t own = arithmetic_digest();
  Peers* const peers = launcher.peers();
  if (peers == nullptr) return {.digest = own, .difference = {}};
  std::uint64_t first = own;
  peers->broadcast(std::as_writable_bytes(std::span(&first, 1)), 0);
  if (peers->sum(own == first ? 0 : 1) == 0) return {.digest = own, .difference = {}};
  std::vector<ProcessRounding> processes;
  for (int index = 0; index < peers->count(); ++index) {
    Sent sent{.digest = own};
    copy_text(sent.host, host_name());
    copy_text(sent.cpu, this_machine().cpu);
    peers->broadcast(std::as_writable_bytes(std::span(&sent, 1)), index);
    processes.push_back({sent.digest, sent.host.data(), sent.cpu.data()});
  }
  return job_rounding(processes);
}

}  // namespace

JobRounding job_rounding(const std::vector<ProcessRounding>& processes) {
  const ProcessRounding& first = processes.front();
  std::map<std::pair<std::string, std::uint64_t>, std::vector<std::size_t>> others;
  for (std::size_t rank = 0; rank < processes.size(); ++rank) {
    if (processes[rank].digest != first.digest)
      others[{processes[rank].host, processes[rank].digest}].push_back(rank);
  }
  if (others.empty()) return {.digest = first.digest, .difference = {}};
  std::vector<std::string> clauses;
  for (const auto& [key, ranks] : others) {
    clauses.push_back(fmt::format("rank{} {} on {} ({}, arithmetic digest {})",
                                  ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "), key.first,
                                  processes[ranks.front()].cpu, digest_text(key.second)));
  }
  return {
      .digest = 0,
      .difference = fmt::format(
          "CPUs differ: {} round{} otherwise than rank 0 on {} ({}, {}), where references run; "
          "so runs are judged within the bounds of the plain reference, not bit by bit, and copies "
          "that both compute, as replicas are, may differ; take hosts with one type of CPU",
          fmt::join(clauses, "; "), others.size() == 1 ? "s" : "", first.host, first.cpu,
          digest_text(first.digest))};
}

const JobRounding& rounding_of_job(Launcher& launcher) {
  static const JobRounding rounding = ask(launcher);
  return rounding;
}

std::string difference_in_rounding(Launcher& launcher) {
  return launcher.peers() == nullptr ? "" : rounding_of_job(launcher).difference;
}

std::vector<std::string> unequal_runs_of_hosts(Launcher& launcher) {
  Peers* const peers = launcher.peers();
  if (peers == nullptr) return {};
  std::vector<std::string> lines = peers->take_differences();
  if (lines.empty()) return {};
  const JobRounding& rounding = rounding_of_job(launcher);
  if (!rounding.difference.empty()) return {};
  for (std::string& line : lines) {
    line = fmt::format(
        "a result that cannot be repeated: {}, though all CPUs round alike (arithmetic digest {}); "
        "that of rank 0 was taken. Look for another LibTorch, another input file or bad memory: "
        "mpirun ... isoshard doctor --attach",
        line, digest_text(rounding.digest));
  }
  return lines;
}

}  // namespace isoshard
