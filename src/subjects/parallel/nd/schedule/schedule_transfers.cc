// SPDX-License-Identifier: Apache-2.0
// Transfers between neighboring stages, in groups by time step.
#include "subjects/parallel/nd/schedule/schedule_transfers.h"

#include <fmt/format.h>

#include "subjects/parallel/nd/schedule/schedule_simulation.h"

namespace isoshard {
namespace {

/// Between `stage` and its neighbor; nothing if there is no such stage or it is on the same rank.
std::optional<StageTransfer> between(const PipelineSpec& spec, const PipelineAction& action,
                                     bool is_send, bool is_gradient) {
  // Activations go up: they are sent to the next stage and received from the one before.
  const int peer_stage = action.stage + (is_send != is_gradient ? 1 : -1);
  if (peer_stage < 0 || peer_stage >= num_stages(spec)) return std::nullopt;
  const int peer_rank = rank_of_stage(spec, peer_stage);
  if (peer_rank == rank_of_stage(spec, action.stage)) return std::nullopt;
  return StageTransfer{is_send,    is_gradient, action.stage,
                       peer_stage, peer_rank,   action.micro_batch};
}

}  // namespace

std::string to_string(const StageTransfer& transfer) {
  return fmt::format("{}{}_{}{}", transfer.stage, transfer.is_send ? "SEND" : "RECV",
                     transfer.is_gradient ? 'B' : 'F', transfer.micro_batch);
}

ActionTransfers transfers_of(const PipelineSpec& spec, const PipelineAction& action) {
  if (action.kind == ActionKind::kBackwardWeight) return {};
  const bool is_gradient = action.kind != ActionKind::kForward;
  return {between(spec, action, false, is_gradient), between(spec, action, true, is_gradient)};
}

std::vector<std::vector<PipelineTurn>> pipeline_turns(const PipelineSchedule& schedule) {
  const PipelineTable table = aligned(schedule).table;
  std::size_t time_steps = 0;
  for (const auto& row : table) time_steps = std::max(time_steps, row.size());
  std::vector<std::vector<PipelineTurn>> turns(table.size());
  for (auto& own : turns) own.resize(time_steps);
  for (std::size_t step = 0; step < time_steps; ++step) {
    for (std::size_t rank = 0; rank < table.size(); ++rank) {
      if (step >= table[rank].size() || !table[rank][step]) continue;
      const PipelineAction& action = *table[rank][step];
      turns[rank][step].action = action;
      const std::optional<StageTransfer> send = transfers_of(schedule.spec, action).sends;
      if (!send) continue;
      turns[rank][step].transfers.push_back(*send);
      turns[static_cast<std::size_t>(send->peer_rank)][step].transfers.push_back(
          {false, send->is_gradient, send->peer_stage, send->stage, static_cast<int>(rank),
           send->micro_batch});
    }
  }
  for (auto& own : turns) {
    for (std::size_t step = 0; step < time_steps; ++step)
      own[step].time_step = static_cast<int>(step);
    std::erase_if(own,
                  [](const PipelineTurn& turn) { return !turn.action && turn.transfers.empty(); });
  }
  return turns;
}

}  // namespace isoshard
