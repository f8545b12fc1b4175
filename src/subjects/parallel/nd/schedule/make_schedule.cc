// SPDX-License-Identifier: Apache-2.0
// The order of actions of each kind of schedule.
//
// Terms: the *warm-up* of a rank is the number of forwards before its first backward. In the
// *steady state* a forward and a backward take turns. A *unit* is one stage of one micro-batch;
// units of a rank are counted in the order in which they go forward, or backward.
#include <algorithm>
#include <map>
#include <utility>

#include "core/base/error.h"
#include "subjects/parallel/nd/schedule/pipeline_schedule.h"
#include "subjects/parallel/nd/schedule/schedule_rounds.h"
#include "subjects/parallel/nd/schedule/schedule_simulation.h"
#include "subjects/parallel/nd/schedule/v_schedule.h"

namespace isoshard {
namespace {

constexpr ActionKind kF = ActionKind::kForward, kB = ActionKind::kBackward,
                     kI = ActionKind::kBackwardInput, kW = ActionKind::kBackwardWeight;

/// A rank's row. Micro-batches of a stage are taken in ascending order for each kind of action, so
/// every stage adds its gradients in ascending order.
class Row {
 public:
  Row(const PipelineSpec& spec, int rank) : spec_(spec), stages_(stages_of_rank(spec, rank)) {}

  /// Appends the next micro-batch of a stage, given by its place among the rank's stages. Leaves it
  /// out if no micro-batch is left.
  void add(ActionKind kind, int place) {
    const int stage = stages_[static_cast<std::size_t>(place)];
    const int micro_batch = count_[{kind, place}]++;
    if (micro_batch < spec_.micro_batches)
      cells_.emplace_back(PipelineAction{kind, stage, micro_batch});
  }

  /// Appends forward unit `unit` of a loop: rounds of micro-batches, the first stage first.
  void add_forward_unit(int unit) { add(kF, unit / micro_batches_per_round(spec_) % places()); }

  /// Appends backward unit `unit` of a loop: rounds of micro-batches, the last stage first.
  void add_backward_unit(ActionKind kind, int unit) {
    add(kind, places() - 1 - unit / micro_batches_per_round(spec_) % places());
  }

  [[nodiscard]] int places() const { return spec_.stages_per_rank; }
  [[nodiscard]] int units() const { return places() * spec_.micro_batches; }
  [[nodiscard]] PipelineTable::value_type take() { return std::move(cells_); }

 private:
  const PipelineSpec& spec_;
  const std::vector<int> stages_;
  std::map<std::pair<ActionKind, int>, int> count_;
  PipelineTable::value_type cells_;
};

void add_gpipe(Row& row) {
  for (int unit = 0; unit < row.units(); ++unit) row.add(kF, 0);
  for (int unit = 0; unit < row.units(); ++unit) row.add(kB, 0);
}

/// 1F1B of `warm_up` forwards. 1F1B itself is the case of one stage a rank.
void add_one_forward_one_backward(Row& row, int warm_up) {
  for (int unit = 0; unit < row.units() + warm_up; ++unit) {
    if (unit < row.units()) row.add_forward_unit(unit);
    if (unit >= warm_up) row.add_backward_unit(kB, unit - warm_up);
  }
}

/// As 1F1B with the input's gradient as backward. The weights' gradients follow `delay` units
/// later, in the time that would be bubbles of the ranks before.
void add_zero_bubble(Row& row, int warm_up, int delay) {
  for (int unit = 0; unit < row.units() + warm_up; ++unit) {
    if (unit < row.units()) row.add_forward_unit(unit);
    if (unit < warm_up) continue;
    row.add_backward_unit(kI, unit - warm_up);
    if (unit - warm_up >= delay) row.add_backward_unit(kW, unit - warm_up - delay);
  }
  for (int unit = std::max(0, row.units() - delay); unit < row.units(); ++unit)
    row.add_backward_unit(kW, unit);
}

/// Both halves of a backward of the rank's first (0) or second (1) stage.
void add_whole_backward(Row& row, int place) {
  row.add(kI, place);
  row.add(kW, place);
}

/// The phases of ZB-V. Forwards of the first stage fill the way down, those of the second the way
/// up. The steady state has a forward and a whole backward of each stage in turn. At the end the
/// weights' gradients fill what waits for the way back.
/// Source   Qi et al. 2023 (arXiv 2401.10241), section 6; torch 2.11, ScheduleZBVZeroBubble.
void add_zbv(Row& row, int rank, const PipelineSpec& spec) {
  const int pp = spec.pp;
  // With fewer micro-batches than fill the pipeline, the order is that of a full one without the
  // micro-batches that are not there.
  const int micro_batches = std::max(spec.micro_batches, 2 * pp - 1);
  // Forwards of the first stage that are left after the warm-up.
  const int steady = micro_batches - (2 * pp - rank - 1);
  for (int i = 0; i < 2 * (pp - rank) - 1; ++i) row.add(kF, 0);
  for (int i = 0; i < rank; ++i) {
    row.add(kF, 1);
    row.add(kF, 0);
  }
  for (int i = 0; i < pp - rank; ++i) {
    row.add(kF, 1);
    add_whole_backward(row, 1);
  }
  // The second stage is pp forwards in; it ends the steady state when it has all.
  for (int i = 0; i < micro_batches - pp; ++i) {
    if (i < steady) row.add(kF, 0);
    add_whole_backward(row, 0);
    row.add(kF, 1);
    add_whole_backward(row, 1);
  }
  for (int i = 0; i < rank; ++i) {
    row.add(kI, 0);
    row.add(kI, 1);
  }
  for (int i = 0; i < pp - rank; ++i) add_whole_backward(row, 0);
  for (int i = 0; i < rank; ++i) row.add(kW, 1);
  for (int i = 0; i < rank; ++i) row.add(kW, 0);
}

PipelineTable::value_type row_of(const PipelineSpec& spec, int rank) {
  Row row(spec, rank);
  const int hops = spec.pp - 1 - rank, turns = warm_up_of_last_rank(spec);
  const auto warm_up = [&](int forwards) { return std::min(forwards, row.units()); };
  switch (spec.kind) {
    case PipelineKind::kGPipe:
      add_gpipe(row);
      break;
    case PipelineKind::k1F1B:
      add_one_forward_one_backward(row, warm_up(hops));
      break;
    case PipelineKind::kInterleaved1F1B:
      add_one_forward_one_backward(row, warm_up(2 * hops + turns));
      break;
    case PipelineKind::kInterleavedZeroBubble:
      add_zero_bubble(row, warm_up(hops + turns), rank);
      break;
    case PipelineKind::kZbvZeroBubble:
      add_zbv(row, rank, spec);
      break;
    case PipelineKind::kCustom:
      throw UsageError(
          "a Custom pipeline schedule must be read from a file, as nothing makes its table");
  }
  return row.take();
}

}  // namespace

PipelineSchedule make_schedule(const PipelineSpec& spec) {
  require_schedulable(spec);
  if (spec.kind == PipelineKind::kInterleaved1F1B && spec.placement == StagePlacement::kV)
    return interleaved_on_a_v(spec);
  PipelineSchedule schedule{spec, {}};
  for (int rank = 0; rank < spec.pp; ++rank) schedule.table.push_back(row_of(spec, rank));
  return aligned(schedule);
}

}  // namespace isoshard
