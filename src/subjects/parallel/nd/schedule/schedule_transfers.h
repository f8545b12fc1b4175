// SPDX-License-Identifier: Apache-2.0
/// The sends and receives that a pipeline schedule asks for, in an order that cannot deadlock.
#pragma once
#include <optional>
#include <vector>

#include "subjects/parallel/nd/schedule/pipeline_schedule.h"

namespace isoshard {

/// One activation (from a stage to the next) or gradient (from a stage to the one before) between
/// two ranks, as one of them sees it.
struct StageTransfer {
  bool is_send = true;
  bool is_gradient = false;  ///< of the receiving stage's output; else its input activation
  int stage = 0;             ///< on this rank
  int peer_stage = 0;
  int peer_rank = 0;
  int micro_batch = 0;
  friend bool operator==(const StageTransfer&, const StageTransfer&) = default;
};

/// "1SEND_F0": this rank's stage, direction, what (F activation, B gradient), micro-batch, as torch
/// writes it.
[[nodiscard]] std::string to_string(const StageTransfer& transfer);

struct ActionTransfers {
  std::optional<StageTransfer> receives;  ///< must have arrived before the action
  std::optional<StageTransfer> sends;     ///< can be made after the action
};

/// What one action needs from and makes for other ranks. Stages that are neighbors on one rank
/// (pp 1, the turns of a V) exchange nothing. backward_weight has neither.
[[nodiscard]] ActionTransfers transfers_of(const PipelineSpec& spec, const PipelineAction& action);

/// One time step of one rank: first the action, then a group of transfers.
struct PipelineTurn {
  int time_step = 0;  ///< of aligned(schedule)
  std::optional<PipelineAction> action;
  std::vector<StageTransfer> transfers;
};

/// By rank, the actions of a schedule with their transfers, in the order in which the rank issues
/// them. Time steps in which a rank does nothing are left out.
///
/// What an action of time step t makes is sent, and received, in the group of time step t on both
/// ranks. An action that needs it comes later. So ranks that complete their groups one after the
/// other, in the order of time steps, meet in each, and none waits for another forever:
/// - one grouped call (Communicator::send_recv) a turn may block until all of its transfers are
///   done, and need not;
/// - so may one blocking call after the other, as both ranks of each pair have the same order
///   (that of the sending ranks within a group).
/// A rank that does not block issues the group and goes on; it waits for a receive only before the
/// action that needs it (transfers_of), which is what lets transfers run while a stage computes. It
/// may also post receives earlier than their group, in the same order for each pair of ranks.
/// A group holds at most one transfer from one rank to another.
///
/// Errors        UsageError if the table cannot be run.
/// Determinism   a function of the schedule.
[[nodiscard]] std::vector<std::vector<PipelineTurn>> pipeline_turns(
    const PipelineSchedule& schedule);

}  // namespace isoshard
