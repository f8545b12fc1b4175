// SPDX-License-Identifier: Apache-2.0
/// A result for people, as lines without newlines, so that each can be marked.
#pragma once
#include <string>
#include <vector>

#include "suite/bench/bench.h"

namespace isoshard {

using Lines = std::vector<std::string>;

/// The mesh of dp x tp, drawn as docs/internals/seeds.md's tool does, and the groups along each
/// axis; with pp and cp one picture for each of their coordinates.
[[nodiscard]] Lines mesh_lines(const Case& item);
/// What will be timed.
[[nodiscard]] Lines plan_lines(const BenchPlan& plan);
[[nodiscard]] Lines gate_lines(const GateResult& gate);
/// Every log_interval-th step, the summary, where the step went, collectives, memory by rank.
[[nodiscard]] Lines result_lines(const BenchResult& result);

/// The result in one line.
[[nodiscard]] Lines speed_lines(const BenchResult& result);

/// "[ungated] " before the lines of a run whose conformance nobody checked.
[[nodiscard]] std::string text_of(const Lines& lines, bool is_gated);

}  // namespace isoshard
