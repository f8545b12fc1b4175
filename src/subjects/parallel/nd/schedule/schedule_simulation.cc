// SPDX-License-Identifier: Apache-2.0
// Actions in the order of their ranks, each as soon as what it needs is done.
#include "subjects/parallel/nd/schedule/schedule_simulation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "core/base/error.h"

namespace isoshard {
namespace {

struct Done {
  double end;
  int rank;
};

class Simulator {
 public:
  Simulator(const PipelineSchedule& schedule, const ActionCosts& costs)
      : schedule_(schedule),
        costs_(costs),
        next_(schedule.table.size()),
        free_(schedule.table.size()) {}

  Simulation run() {
    for (bool progress = true; progress;) {
      progress = false;
      for (std::size_t rank = 0; rank < next_.size(); ++rank)
        while (step(rank)) progress = true;
    }
    for (std::size_t rank = 0; rank < next_.size(); ++rank) {
      if (const auto action = head(rank))
        result_.blocked.push_back({static_cast<int>(rank), static_cast<int>(next_[rank]), *action,
                                   *first_missing(*action)});
    }
    std::ranges::stable_sort(
        result_.ran, {}, [](const SimulatedAction& ran) { return std::pair(ran.start, ran.rank); });
    return std::move(result_);
  }

 private:
  /// The rank's next action, past empty cells.
  std::optional<PipelineAction> head(std::size_t rank) {
    const auto& row = schedule_.table[rank];
    while (next_[rank] < row.size() && !row[next_[rank]]) ++next_[rank];
    return next_[rank] < row.size() ? row[next_[rank]] : std::nullopt;
  }

  [[nodiscard]] const Done* find(const PipelineAction& action) const {
    const auto found = done_.find(action);
    return found == done_.end() ? nullptr : &found->second;
  }

  /// The actions that make what `action` needs: any one of each list.
  [[nodiscard]] std::vector<std::vector<PipelineAction>> needs(const PipelineAction& action) const {
    const auto [kind, stage, micro_batch] = action;
    if (kind == ActionKind::kBackwardWeight)
      return {{{ActionKind::kBackwardInput, stage, micro_batch}}};
    if (kind == ActionKind::kForward) {
      if (stage == 0) return {};
      return {{{ActionKind::kForward, stage - 1, micro_batch}}};
    }
    std::vector<std::vector<PipelineAction>> all{{{ActionKind::kForward, stage, micro_batch}}};
    if (stage + 1 < num_stages(schedule_.spec))
      all.push_back({{ActionKind::kBackward, stage + 1, micro_batch},
                     {ActionKind::kBackwardInput, stage + 1, micro_batch}});
    return all;
  }

  [[nodiscard]] const Done* first_done(const std::vector<PipelineAction>& any) const {
    for (const PipelineAction& action : any)
      if (const Done* const done = find(action)) return done;
    return nullptr;
  }

  [[nodiscard]] bool in_table(const PipelineAction& action) const {
    return std::ranges::any_of(schedule_.table, [&](const auto& row) {
      return std::ranges::find(row, std::optional(action)) != row.end();
    });
  }

  [[nodiscard]] std::optional<PipelineAction> first_missing(const PipelineAction& action) const {
    for (const auto& any : needs(action)) {
      if (first_done(any) != nullptr) continue;
      const auto listed =
          std::ranges::find_if(any, [&](const PipelineAction& need) { return in_table(need); });
      return listed == any.end() ? any.front() : *listed;
    }
    return std::nullopt;
  }

  bool step(std::size_t rank) {
    const std::optional<PipelineAction> action = head(rank);
    if (!action) return false;
    double start = free_[rank];
    for (const auto& any : needs(*action)) {
      const Done* const done = first_done(any);
      if (done == nullptr) return false;
      const bool is_far = done->rank != static_cast<int>(rank);
      start = std::max(start, done->end + (is_far ? costs_.transfer : 0));
    }
    const double end = start + cost_of(action->kind, costs_);
    result_.ran.push_back(
        {static_cast<int>(rank), static_cast<int>(next_[rank]), *action, start, end});
    done_.try_emplace(*action, Done{end, static_cast<int>(rank)});
    free_[rank] = end;
    ++next_[rank];
    return true;
  }

  const PipelineSchedule& schedule_;
  const ActionCosts costs_;
  std::vector<std::size_t> next_;
  std::vector<double> free_;
  std::map<PipelineAction, Done> done_;
  Simulation result_;
};

Simulation simulate_to_the_end(const PipelineSchedule& schedule, const ActionCosts& costs) {
  Simulation simulation = simulate(schedule, costs);
  if (!simulation.blocked.empty()) {
    const BlockedAction& blocked = simulation.blocked.front();
    throw UsageError(fmt::format(
        "a pipeline schedule must be executable, but rank {}, time step {}, {} waits "
        "for {}, which never runs; correct the table",
        blocked.rank, blocked.time_step, to_string(blocked.action), to_string(blocked.waits_for)));
  }
  return simulation;
}

}  // namespace

double cost_of(ActionKind kind, const ActionCosts& costs) {
  switch (kind) {
    case ActionKind::kForward:
      return costs.forward;
    case ActionKind::kBackward:
      return costs.backward;
    case ActionKind::kBackwardInput:
      return costs.backward_input;
    case ActionKind::kBackwardWeight:
      return costs.backward_weight;
  }
  return 0;
}

Simulation simulate(const PipelineSchedule& schedule, const ActionCosts& costs) {
  return Simulator(schedule, costs).run();
}

PipelineSchedule aligned(const PipelineSchedule& schedule) {
  PipelineSchedule result{schedule.spec, PipelineTable(schedule.table.size())};
  for (const SimulatedAction& ran : simulate_to_the_end(schedule, kUnitCosts).ran) {
    auto& row = result.table[static_cast<std::size_t>(ran.rank)];
    row.resize(static_cast<std::size_t>(ran.start));
    row.emplace_back(ran.action);
  }
  return result;
}

PipelineTiming timing(const PipelineSchedule& schedule, const ActionCosts& costs) {
  for (const double cost :
       {costs.forward, costs.backward, costs.backward_input, costs.backward_weight, costs.transfer})
    if (!(cost >= 0) || !std::isfinite(cost))
      throw UsageError(fmt::format("a cost of an action must be a number >= 0, got {}", cost));
  PipelineTiming result;
  result.work.resize(schedule.table.size());
  for (const SimulatedAction& ran : simulate_to_the_end(schedule, costs).ran) {
    result.makespan = std::max(result.makespan, ran.end);
    result.work[static_cast<std::size_t>(ran.rank)] += cost_of(ran.action.kind, costs);
  }
  if (result.makespan == 0) return result;
  result.ideal = std::ranges::max(result.work);
  const double sum = std::accumulate(result.work.begin(), result.work.end(), 0.0);
  result.bubble_share = 1 - sum / (static_cast<double>(result.work.size()) * result.makespan);
  return result;
}

}  // namespace isoshard
