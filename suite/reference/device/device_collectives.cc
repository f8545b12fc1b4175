// SPDX-License-Identifier: Apache-2.0
// The choice, and the probe that it may need.
#include "suite/reference/device/device_collectives.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

#include "core/base/error.h"
#include "core/comm/nccl/nccl_world.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/gpus.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

constexpr std::chrono::seconds kProbeDeadline{20};

/// Answers for this machine, by the number of ranks.
std::map<int, std::string>& shared_gpus() {
  static std::map<int, std::string> why_not;
  return why_not;
}

DeviceCollectives staged_because(std::string_view backend, std::string_view why) {
  return {.words = fmt::format("{}, staged through host memory: {}", backend, why)};
}

/// A sum over all ranks, from host memory and back.
void require_sum(Rank& rank, std::size_t count) {
  std::vector<float> values(count, static_cast<float>(rank.rank() + 1));
  rank.comm()
      .all_reduce({reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(count),
                   Dtype::kFloat32},
                  Reduction::kSum, {Purpose::kUnspecified, Axis::kWorld})
      .wait();
  const auto expected = static_cast<float>(rank.size() * (rank.size() + 1) / 2);
  const auto wrong = std::ranges::find_if(values, [&](float value) { return value != expected; });
  if (wrong == values.end()) return;
  throw InfrastructureError(fmt::format("element {} of a sum of {} must be {}, got {}",
                                        wrong - values.begin(), count, expected, *wrong));
}

std::string one_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  std::ranges::replace(text, '\n', ' ');
  return text;
}

}  // namespace

DeviceCollectives choose_collectives(const CollectivesFacts& facts) {
  if (facts.ranks == 1) return {.words = "none: a world of one rank"};
  if (!facts.forks_ranks && facts.has_nccl)
    return {.words = "nccl: ranks are processes that live for the whole run"};
  if (!facts.forks_ranks) return staged_because("mpi", "ranks are processes of mpirun");
  if (!facts.has_nccl) return staged_because("shm", "this program has no NCCL");
  if (facts.ranks <= facts.gpus) return {nccl_transport(), "nccl, a GPU for each rank"};
  const std::string why_not = facts.why_not_shared();
  if (why_not.empty()) {
    return {nccl_transport(), fmt::format("nccl, {} ranks on {} GPU{}, which a probe found to work",
                                          facts.ranks, facts.gpus, facts.gpus == 1 ? "" : "s")};
  }
  return staged_because("shm",
                        fmt::format("ranks that share a GPU cannot use NCCL here ({})", why_not));
}

std::string why_no_shared_gpus(int ranks, std::chrono::milliseconds deadline) {
  const WorldReport report = run_forked({.size = ranks,
                                         .name = "probe of NCCL",
                                         .process_name = "nccl probe",
                                         .deadline = deadline,
                                         .transport = nccl_transport()},
                                        [](Rank& rank) {
                                          constexpr std::size_t kGathered = 1000, kSliced = 100'000;
                                          require_sum(rank, kGathered);
                                          require_sum(rank, kSliced);
                                        });
  if (report.ok()) return {};
  return one_line(report.cause.empty() ? report.describe() : report.cause);
}

DeviceCollectives device_collectives(const Case& c) {
  return device_collectives(c.device, is_reference(c.subject) ? 1 : c.world_size());
}

DeviceCollectives device_collectives(Device::Kind device, int ranks) {
  if (device == Device::Kind::kCpu) return {};
  const int gpus = count_gpus().count;
  return choose_collectives({.ranks = ranks,
                             .gpus = gpus,
                             .forks_ranks = default_launcher().shares_memory(),
                             .has_nccl = static_cast<bool>(gpu_api()),
                             .why_not_shared = [ranks] {
                               const auto known = shared_gpus().find(ranks);
                               if (known != shared_gpus().end()) return known->second;
                               return shared_gpus()[ranks] =
                                          why_no_shared_gpus(ranks, kProbeDeadline);
                             }});
}

std::string words_of_worlds(Device::Kind device, std::vector<int> sizes) {
  std::ranges::sort(sizes);
  const auto repeated = std::ranges::unique(sizes);
  sizes.erase(repeated.begin(), repeated.end());
  std::vector<std::pair<std::string, std::vector<int>>> ways;
  for (const int size : sizes) {
    std::string words = device_collectives(device, size).words;
    const auto known = std::ranges::find(ways, words, [](const auto& way) { return way.first; });
    if (known != ways.end()) {
      known->second.push_back(size);
    } else {
      ways.push_back({std::move(words), {size}});
    }
  }
  if (ways.size() == 1) return ways.front().first;
  std::vector<std::string> texts;
  for (const auto& [words, worlds] : ways) {
    texts.push_back(fmt::format("{} rank{}: {}", fmt::join(worlds, " and "),
                                worlds == std::vector{1} ? "" : "s", words));
  }
  return fmt::format("{}", fmt::join(texts, "; "));
}

void forget_shared_gpus() noexcept {
  shared_gpus().clear();
}

std::map<std::string, std::string> collectives_environment(const std::vector<Case>& cases) {
  std::vector<std::string> ways;
  for (const Case& c : cases) {
    if (c.device == Device::Kind::kCpu) continue;
    std::string words = device_collectives(c).words;
    if (std::ranges::find(ways, words) == ways.end()) ways.push_back(std::move(words));
  }
  if (ways.empty()) return {};
  return {{"device.collectives", fmt::format("{}", fmt::join(ways, "; "))}};
}

}  // namespace isoshard
