// SPDX-License-Identifier: Apache-2.0
/// How long the collectives of a recorded run took, by their purpose.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/comm/communicator.h"
#include "harness/report/report.h"
#include "harness/world/launcher.h"
#include "suite/clock/step_clock.h"

namespace isoshard {

/// One row for each purpose that ranks called for: of one of `steps` steps on average.
/// Requires   steps > 0.
[[nodiscard]] std::vector<ReportCollective> purpose_rows(std::span<const PurposeTimes> ranks,
                                                         double steps, bool has_hidden);

/// Times of one run, which its ranks measure with the clock of benchmarks (step_clock.h) and no
/// trace has: what is recorded and judged is the same without them.
///
/// Requires   made by the controller before the ranks start, and outlives them.
///
///     CollectiveTimes times(mesh.world_size());
///     spec.decorate = times.metering(std::move(spec.decorate));
///     ...                                      // on each rank begin_step and end_step
///     const auto rows = times.rows(launcher);  // after the ranks' end
class CollectiveTimes {
 public:
  explicit CollectiveTimes(int num_ranks);
  ~CollectiveTimes();
  CollectiveTimes(const CollectiveTimes&) = delete;
  CollectiveTimes& operator=(const CollectiveTimes&) = delete;

  /// Below what `decorate` does (which may be empty), so that a fault's delay is not a
  /// collective's.
  [[nodiscard]] CommDecorator metering(CommDecorator decorate);
  /// Ranks   local, on a rank; calls outside of a step do not count.
  void begin_step(int rank);
  void end_step(int rank);
  /// None where no step was measured.
  /// Ranks   called by the controller; with peers (Launcher::peers) collective over them.
  [[nodiscard]] std::vector<ReportCollective> rows(Launcher& launcher) const;

 private:
  /// What a rank leaves.
  struct Slot {
    PurposeTimes purposes{};
    std::int64_t steps = 0;
    bool has_hidden = false;
  };
  int num_ranks_;
  Slot* slots_;  ///< by rank, in memory that forked ranks share with the controller
  /// Of the rank that this process is. Made when its communicator is.
  std::unique_ptr<StepClock> clock_;
};

}  // namespace isoshard
