// SPDX-License-Identifier: Apache-2.0
/// A pipeline schedule as data: which action of which stage and micro-batch each rank runs, in
/// which order.
///
/// A *stage* is a run of consecutive layers. A *rank* here is a rank of the pp axis; it holds
/// `stages_per_rank` stages. A *table* has one row a rank and one column a time step. A row's
/// actions run in the order of their columns. An empty cell is an idle step of the picture and asks
/// for nothing: a rank runs its next action as soon as what it needs is there. Sends and receives
/// are not in the table, as they follow from it (schedule_transfers.h).
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace isoshard {

/// The schedules, by the names of torch's get_schedule_class: GPipe, 1F1B, Interleaved1F1B,
/// InterleavedZeroBubble (ZB1P, also called ZB-H1), ZBVZeroBubble (ZB-V), and Custom: a table that
/// somebody else made.
enum class PipelineKind {
  kGPipe,
  k1F1B,
  kInterleaved1F1B,
  kInterleavedZeroBubble,
  kZbvZeroBubble,
  kCustom
};

/// Which rank holds a stage. kLoop: stage s is on rank s mod pp. kV: the ranks go up and down in
/// turn, so the last stage of one turn and the first of the next are on the same rank.
enum class StagePlacement { kLoop, kV };

/// kBackward makes the gradients of input and weights together. kBackwardInput makes that of the
/// input alone, and kBackwardWeight the weights' afterwards.
enum class ActionKind : char {
  kForward = 'F',
  kBackward = 'B',
  kBackwardInput = 'I',
  kBackwardWeight = 'W'
};

struct PipelineAction {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;
  int micro_batch = 0;
  friend bool operator==(const PipelineAction&, const PipelineAction&) = default;
  friend auto operator<=>(const PipelineAction&, const PipelineAction&) = default;
};

/// "1F0": stage, kind, micro-batch, as torch writes it.
[[nodiscard]] std::string to_string(const PipelineAction& action);

struct PipelineSpec {
  PipelineKind kind = PipelineKind::k1F1B;
  int pp = 1;  ///< ranks of the pipeline
  int stages_per_rank = 1;
  StagePlacement placement = StagePlacement::kLoop;
  int micro_batches = 1;
  friend bool operator==(const PipelineSpec&, const PipelineSpec&) = default;
};

/// One row a rank; rows may differ in length.
using PipelineTable = std::vector<std::vector<std::optional<PipelineAction>>>;

struct PipelineSchedule {
  PipelineSpec spec;
  PipelineTable table;
};

[[nodiscard]] std::string_view to_string(PipelineKind kind);
[[nodiscard]] std::string_view to_string(StagePlacement placement);

/// The kind of a name. Case, '_' and '-' are not counted; zb1p and zbv are further names.
/// Errors   NotBuiltError for torch's LoopedBFS and DualPipeV, UsageError for any other name.
[[nodiscard]] PipelineKind pipeline_kind_of(std::string_view name);

/// kV for ZBVZeroBubble, kLoop for all others.
[[nodiscard]] StagePlacement default_placement(PipelineKind kind);

/// The placement of a name, "loop" or "v" in any case.   Errors   UsageError for any other name.
[[nodiscard]] StagePlacement stage_placement_of(std::string_view name);

/// A schedule by name; `placement` is a name, too, or empty: the schedule's default.
/// Errors   as pipeline_kind_of and stage_placement_of.
[[nodiscard]] PipelineSpec pipeline_spec(std::string_view name, int pp, int stages_per_rank,
                                         std::string_view placement = {}, int micro_batches = 1);

/// Whether the kind's backward runs in halves.
[[nodiscard]] bool has_split_backward(PipelineKind kind);

[[nodiscard]] int num_stages(const PipelineSpec& spec);

/// Requires   0 <= stage < num_stages(spec).
/// Source     torch 2.11, distributed/pipelining/_utils.py, generate_stage_to_rank_mapping.
[[nodiscard]] int rank_of_stage(const PipelineSpec& spec, int stage);

/// The stages of a rank, ascending; `stages_per_rank` of them.
[[nodiscard]] std::vector<int> stages_of_rank(const PipelineSpec& spec, int rank);

/// Refuses what no schedule of the kind exists for.
///
/// Errors   UsageError "X must be Y, got Z": a count below 1; more than one stage a rank for GPipe
///          and 1F1B; fewer micro-batches than stages for 1F1B; micro-batches that are no multiple
///          of their rounds, max(1, micro_batches / pp), for Interleaved1F1B in a loop and for
///          InterleavedZeroBubble; another placement or number of stages than ZBVZeroBubble (V, 2)
///          and InterleavedZeroBubble (loop) have. These are torch's refusals, too.
void require_schedulable(const PipelineSpec& spec);

/// Refuses fewer micro-batches than stages, with which a pipeline is never full. torch refuses it
/// for 1F1B only; a convergence test asks for it with every schedule.
/// Errors   UsageError with the numbers.
void require_filled(const PipelineSpec& spec);

/// The schedule of a kind other than Custom, with every action at its earliest time step if each
/// takes one step.
///
/// Errors        as require_schedulable; UsageError for Custom, which is read from a file
///               (schedule_text.h).
/// Determinism   a function of the spec.
/// Source        torch 2.11, distributed/pipelining/schedules.py: the same actions in the same
///               order on every rank, by fixtures/oracle/pipeline_schedules. Interleaved1F1B on a V
///               is ours: torch has no such schedule. docs/reference/subjects.md names the
///               differences.
[[nodiscard]] PipelineSchedule make_schedule(const PipelineSpec& spec);

/// By rank, how many forward activations (each of one stage and micro-batch) may be alive at once.
/// One is alive from its forward to its backward or, where these are apart, its backward_weight.
///
/// With r the rank, v the stages a rank, M the micro-batches and m = M / max(1, M / pp) those of a
/// round, no more than v M and
///     GPipe                     M
///     1F1B                      pp - r
///     Interleaved1F1B, loop     2 (pp - 1 - r) + (v - 1) m + 1
///     Interleaved1F1B, V        v pp
///     InterleavedZeroBubble     pp + (v - 1) m
///     ZBVZeroBubble             2 pp
///     Custom                    v M
[[nodiscard]] std::vector<int> memory_bound(const PipelineSpec& spec);

}  // namespace isoshard
