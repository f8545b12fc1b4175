// SPDX-License-Identifier: Apache-2.0
/// Tables of pipeline schedules as text: torch's CSV dumps, and pictures.
#pragma once
#include <string>
#include <string_view>

#include "subjects/parallel/nd/schedule/pipeline_schedule.h"

namespace isoshard {

/// One line a rank, cells "0F0" joined by commas, an idle step empty. torch reads it with
/// _load_csv(format="compute_only").
[[nodiscard]] std::string csv_of(const PipelineSchedule& schedule);

/// Reads a table of `spec` from what torch's _dump_csv(format="compute_only") writes. The kind of
/// the spec says which memory bound the table has to keep; Custom is free. What the table says is
/// not checked here: call require_sound().
///
/// Errors   FileError "SOURCE: line L, cell C: ..." for a cell that is no action; a dump with
///          sends and receives (format="compute_comms"), and torch's OVERLAP_F_B, are refused by
///          name.
[[nodiscard]] PipelineSchedule schedule_from_csv(const PipelineSpec& spec, std::string_view csv,
                                                 std::string_view source);

/// The spec, of kind Custom, that a table seems to have: pp is the number of lines, stages and
/// micro-batches are one more than the largest that is named, the placement is the one whose ranks
/// hold their stages. A table that lacks its last micro-batch seems to be one with fewer, so
/// compare with what is wanted.
///
/// Errors   FileError as schedule_from_csv; for no action, or less than half of those that stages
///          and micro-batches ask for; for a number of stages that is no multiple of the lines; for
///          stages on the ranks of neither placement.
[[nodiscard]] PipelineSpec spec_of_csv(std::string_view csv, std::string_view source);

/// One line a rank, one column a time step, '.' where a rank is idle. Time steps that do not fit in
/// `width` columns go on below. With one stage a rank the stage is left out, as it is the rank.
///
///     time   0  1  2  3  4  5
///     rank 0 F0 F1 .  B0 .  B1
///     rank 1 .  F0 B0 F1 B1
///
/// Errors   UsageError if `width` cannot hold one time step.
[[nodiscard]] std::string picture(const PipelineSchedule& schedule, int width = 100);

}  // namespace isoshard
