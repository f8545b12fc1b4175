// SPDX-License-Identifier: Apache-2.0
// Refuses what does not fit into the memory of the machine.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "app/bench_actions.h"
#include "core/base/error.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/machine.h"
#include "subjects/model/config/builtin.h"
#include "suite/bench/formulas/fitting.h"
#include "suite/bench/formulas/memory_model.h"

namespace isoshard {
namespace {

using FlagList = std::vector<std::string>;

/// Share of the available memory that may be predicted for all ranks together.
constexpr double kShareOfMemory = 0.9;

std::string quoted_command(const BenchPlan& plan, const FlagList& changes) {
  FlagList words = plan.arguments;
  for (std::size_t i = 0; i + 1 < changes.size(); i += 2) {
    const auto found = std::ranges::find(words, changes[i]);
    if (found != words.end() && found + 1 != words.end()) {
      *(found + 1) = changes[i + 1];
    } else {
      words.insert(words.end(), {changes[i], changes[i + 1]});
    }
  }
  return fmt::format("isoshard bench {}", fmt::join(words, " "));
}

/// The model with fewer layers or shorter samples, or else a smaller one.
std::string command_that_fits(const BenchPlan& plan, double usable) {
  for (const std::string& name :
       {plan.model_name, std::string("Qwen/Qwen3-0.6B"), std::string("small")}) {
    Case item = plan.item;
    FlagList changes;
    if (name != plan.model_name) {
      item.config = builtin_config(name);
      item.weights_path.clear();
      changes = {"--model", name};
      item.seq_length = std::min(item.seq_length, item.config.max_positions);
    }
    const std::optional<Case> cut = cut_to_fit(item, usable);
    if (!cut.has_value()) continue;
    if (cut->config.num_layers != item.config.num_layers)
      changes.insert(changes.end(), {"--num-layers", std::to_string(cut->config.num_layers)});
    if (cut->seq_length != plan.item.seq_length)
      changes.insert(changes.end(), {"--seq-length", std::to_string(cut->seq_length)});
    try {
      cut->validate();
    } catch (const UsageError&) {
      continue;  // degrees that do not fit this model
    }
    return fmt::format("this fits: {}", quoted_command(plan, changes));
  }
  return "take fewer processes or shorter samples";
}

/// The share of the ranks that run on this machine.
double share_of_ranks_here(const Case& item) {
  const Peers* const peers = default_launcher().peers();
  if (peers == nullptr || num_processes(item) == 1) return 1;
  const Hosts& hosts = peers->hosts();
  const auto host =
      static_cast<std::size_t>(hosts.host_of.at(static_cast<std::size_t>(peers->index())));
  return std::min(1.0, static_cast<double>(hosts.num_processes.at(host)) / num_processes(item));
}

}  // namespace

void refuse_without_memory(const BenchPlan& plan) {
  const MachineMemory there = memory_of_machine();
  if (there.bytes <= 0) return;  // not known
  const double needed = predicted_bytes_of_world(plan.item) * share_of_ranks_here(plan.item),
               usable = kShareOfMemory * static_cast<double>(there.available_bytes);
  // processes that run together must decide alike
  const bool is_too_large = needed > usable;
  const std::int64_t lacking = sum_over_peers(default_launcher(), is_too_large ? 1 : 0);
  if (lacking == 0) return;
  if (!is_too_large)
    throw UsageError(fmt::format(
        "{} of {} needs more memory than another host of the job has; take shorter samples, fewer "
        "layers, or fewer ranks on that host",
        plan.impl, plan.model_name));
  const RankMemory largest = largest_of(predicted_memory(plan.item));
  const std::string way_out = command_that_fits(plan, usable);
  throw UsageError(fmt::format(
      "{} of {} needs {:.0f} bytes of memory ({}) for {} {}, up to {} each, but {:.0f} bytes ({}) "
      "are usable here; {}",
      plan.impl, plan.model_name, needed, in_gib(needed), num_processes(plan.item),
      num_processes(plan.item) == 1 ? "process" : "processes", in_gib(largest.peak), usable,
      in_gib(usable), way_out));
}

}  // namespace isoshard
