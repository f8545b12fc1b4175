// SPDX-License-Identifier: Apache-2.0
// Each rule is one function over the cells of a table.
#include "subjects/parallel/nd/schedule/schedule_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "subjects/parallel/nd/schedule/schedule_simulation.h"

namespace isoshard {
namespace {

struct Cell {
  int rank, time_step;
  PipelineAction action;
};

std::string place(int rank, int time_step, const PipelineAction& action) {
  return fmt::format("rank {}, time step {}, {}", rank, time_step, to_string(action));
}

std::string place(const Cell& cell) {
  return place(cell.rank, cell.time_step, cell.action);
}

std::string_view word(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return "forward";
    case ActionKind::kBackward:
      return "backward";
    case ActionKind::kBackwardInput:
      return "backward_input";
    case ActionKind::kBackwardWeight:
      return "backward_weight";
  }
  return "?";
}

/// +1 where an action keeps a forward activation, -1 where it lets one go.
int kept_activations(ActionKind kind) {
  if (kind == ActionKind::kForward) return 1;
  return kind == ActionKind::kBackwardInput ? 0 : -1;
}

class Checker {
 public:
  Checker(const PipelineSchedule& schedule, std::vector<int> bound)
      : schedule_(schedule), spec_(schedule.spec), bound_(std::move(bound)) {
    for (std::size_t rank = 0; rank < schedule.table.size(); ++rank)
      for (std::size_t step = 0; step < schedule.table[rank].size(); ++step)
        if (const auto& action = schedule.table[rank][step])
          cells_.push_back({static_cast<int>(rank), static_cast<int>(step), *action});
  }

  std::vector<PipelineFinding> run() {
    check_rows();
    check_range();
    if (findings_.empty()) {
      check_ranks();
      check_twice();
      check_missing();
      check_execution();
      check_memory();
      check_gradient_order();
    }
    std::ranges::stable_sort(findings_, {}, [](const PipelineFinding& finding) {
      return std::tuple(finding.rule, finding.rank, finding.time_step);
    });
    return std::move(findings_);
  }

 private:
  void report(PipelineRule rule, const Cell& cell, const std::string& what) {
    findings_.push_back({rule, cell.rank, cell.time_step, cell.action, place(cell) + ": " + what});
  }

  void check_rows() {
    if (std::cmp_equal(schedule_.table.size(), spec_.pp)) return;
    findings_.push_back({PipelineRule::kRows, -1, -1, std::nullopt,
                         fmt::format("the table must have {} rows, one a rank, got {}", spec_.pp,
                                     schedule_.table.size())});
  }

  void check_range() {
    for (const Cell& cell : cells_) {
      if (cell.action.stage < 0 || cell.action.stage >= num_stages(spec_))
        report(PipelineRule::kRange, cell,
               fmt::format("its stage must be below {}, got {}", num_stages(spec_),
                           cell.action.stage));
      if (cell.action.micro_batch < 0 || cell.action.micro_batch >= spec_.micro_batches)
        report(PipelineRule::kRange, cell,
               fmt::format("its micro-batch must be below {}, got {}", spec_.micro_batches,
                           cell.action.micro_batch));
    }
  }

  void check_ranks() {
    for (const Cell& cell : cells_) {
      const int holder = rank_of_stage(spec_, cell.action.stage);
      if (holder != cell.rank)
        report(PipelineRule::kRank, cell,
               fmt::format("stage {} must run on rank {}, got rank {}", cell.action.stage, holder,
                           cell.rank));
    }
  }

  /// Fills first_, where each action is.
  void check_twice() {
    for (const Cell& cell : cells_) {
      const auto [first, is_new] = first_.try_emplace(cell.action, cell);
      if (!is_new)
        report(PipelineRule::kTwice, cell,
               fmt::format("an action must be there once, but it is also at {}",
                           place(first->second)));
    }
    for (const auto& [action, cell] : first_) {
      if (action.kind != ActionKind::kBackwardInput && action.kind != ActionKind::kBackwardWeight)
        continue;
      if (const Cell* const whole = find(ActionKind::kBackward, action))
        report(PipelineRule::kTwice, cell,
               fmt::format("a backward must be whole or in halves, but {} is there, too",
                           place(*whole)));
    }
  }

  [[nodiscard]] const Cell* find(ActionKind kind, const PipelineAction& like) const {
    const auto found = first_.find({kind, like.stage, like.micro_batch});
    return found == first_.end() ? nullptr : &found->second;
  }

  void check_missing() {
    for (int stage = 0; stage < num_stages(spec_); ++stage) {
      for (int micro_batch = 0; micro_batch < spec_.micro_batches; ++micro_batch) {
        const PipelineAction any{ActionKind::kForward, stage, micro_batch};
        require_there(ActionKind::kForward, any);
        if (find(ActionKind::kBackward, any) != nullptr) continue;
        const bool has_input = find(ActionKind::kBackwardInput, any) != nullptr,
                   has_weight = find(ActionKind::kBackwardWeight, any) != nullptr;
        if (!has_input && !has_weight) {
          require_there(ActionKind::kBackward, any);
        } else {
          require_there(ActionKind::kBackwardInput, any);
          require_there(ActionKind::kBackwardWeight, any);
        }
      }
    }
  }

  void require_there(ActionKind kind, const PipelineAction& like) {
    if (find(kind, like) != nullptr) return;
    const PipelineAction missing{kind, like.stage, like.micro_batch};
    const int rank = rank_of_stage(spec_, like.stage);
    findings_.push_back(
        {PipelineRule::kMissing, rank, -1, missing,
         fmt::format("rank {}: {} (the {} of stage {}, micro-batch {}) must be "
                     "there, but no time step has it",
                     rank, to_string(missing), word(kind), like.stage, like.micro_batch)});
  }

  void check_execution() {
    for (const BlockedAction& blocked : simulate(schedule_, kUnitCosts).blocked) {
      const Cell cell{blocked.rank, blocked.time_step, blocked.action};
      const Cell* const source = find(blocked.waits_for.kind, blocked.waits_for);
      if (source == nullptr)
        report(PipelineRule::kBlocked, cell,
               fmt::format("it waits for {}, which is missing", to_string(blocked.waits_for)));
      else if (source->rank == cell.rank)
        report(PipelineRule::kOrder, cell,
               fmt::format("{} must run before it, but comes at time step {}",
                           to_string(source->action), source->time_step));
      else
        report(PipelineRule::kBlocked, cell,
               fmt::format("it waits for {}, which rank {} never reaches", place(*source),
                           source->rank));
    }
  }

  void check_memory() {
    std::vector<int> alive(bound_.size()), is_reported(bound_.size());
    for (const Cell& cell : cells_) {
      const auto rank = static_cast<std::size_t>(cell.rank);
      alive[rank] += kept_activations(cell.action.kind);
      if (alive[rank] <= bound_[rank] || is_reported[rank] != 0) continue;
      is_reported[rank] = 1;
      report(PipelineRule::kMemory, cell,
             fmt::format("the forward activations alive must be at most {} for {}, got {}",
                         bound_[rank], to_string(spec_.kind), alive[rank]));
    }
  }

  void check_gradient_order() {
    std::map<int, Cell> last;  // by stage
    std::vector<int> is_reported(schedule_.table.size());
    for (const Cell& cell : cells_) {
      if (kept_activations(cell.action.kind) >= 0) continue;
      const auto [before, is_first] = last.try_emplace(cell.action.stage, cell);
      int& reported = is_reported[static_cast<std::size_t>(cell.rank)];
      if (!is_first && cell.action.micro_batch < before->second.action.micro_batch &&
          reported++ == 0)
        report(PipelineRule::kGradientOrder, cell,
               fmt::format("gradients of stage {} must be added in ascending order of "
                           "micro-batches, but {} comes before it",
                           cell.action.stage, place(before->second)));
      before->second = cell;
    }
  }

  const PipelineSchedule& schedule_;
  const PipelineSpec& spec_;
  const std::vector<int> bound_;
  std::vector<Cell> cells_;  // by rank, then time step
  std::map<PipelineAction, Cell> first_;
  std::vector<PipelineFinding> findings_;
};

void require_counts(const PipelineSpec& spec) {
  if (spec.pp < 1 || spec.stages_per_rank < 1 || spec.micro_batches < 1)
    throw UsageError(
        fmt::format("pp, stages per rank and micro-batches must be at least 1, got "
                    "{}, {} and {}",
                    spec.pp, spec.stages_per_rank, spec.micro_batches));
}

}  // namespace

std::string_view to_string(PipelineRule rule) {
  switch (rule) {
    case PipelineRule::kRows:
      return "rows";
    case PipelineRule::kRange:
      return "range";
    case PipelineRule::kRank:
      return "rank";
    case PipelineRule::kTwice:
      return "twice";
    case PipelineRule::kMissing:
      return "missing";
    case PipelineRule::kOrder:
      return "order";
    case PipelineRule::kBlocked:
      return "blocked";
    case PipelineRule::kMemory:
      return "memory";
    case PipelineRule::kGradientOrder:
      return "gradient_order";
  }
  return "?";
}

std::vector<PipelineFinding> check(const PipelineSchedule& schedule, std::span<const int> bound) {
  require_counts(schedule.spec);
  std::vector<int> limits(bound.begin(), bound.end());
  if (limits.empty()) limits = memory_bound(schedule.spec);
  if (!std::cmp_equal(limits.size(), schedule.spec.pp))
    throw UsageError(fmt::format("the memory bound must have {} numbers, one a rank, got {}",
                                 schedule.spec.pp, limits.size()));
  return Checker(schedule, std::move(limits)).run();
}

void require_sound(const PipelineSchedule& schedule, std::span<const int> bound) {
  const std::vector<PipelineFinding> findings = check(schedule, bound);
  if (findings.empty()) return;
  std::string message = fmt::format("the pipeline schedule {} must keep all rules, but breaks {}:",
                                    to_string(schedule.spec.kind), findings.size());
  for (const PipelineFinding& finding : findings)
    message += fmt::format("\n  {}: {}", to_string(finding.rule), finding.message);
  throw UsageError(message);
}

std::vector<int> peak_activations(const PipelineSchedule& schedule) {
  std::vector<int> peaks;
  for (const auto& row : schedule.table) {
    int alive = 0, peak = 0;
    for (const auto& action : row)
      if (action) peak = std::max(peak, alive += kept_activations(action->kind));
    peaks.push_back(peak);
  }
  return peaks;
}

}  // namespace isoshard
