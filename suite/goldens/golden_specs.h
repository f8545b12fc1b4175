// SPDX-License-Identifier: Apache-2.0
/// The goldens of the project: which runs, under which names.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fixtures/cases/case.h"

namespace isoshard {

/// kCurve: loss, each dp rank's loss, gradient norm and learning rate of every step of a training
/// run. kStep: a digest and the norm of every tensor of one step. kLattice: the same of a lattice
/// model, whose every value is the same on every machine.
enum class GoldenKind : std::uint8_t { kCurve, kStep, kLattice };

struct GoldenSpec {
  /// "curve_autotp_tp2_dp2_bf16_adamw", "step_qwen2_tp2_dp3", "lattice_ddp_dp2_bf16"
  std::string name;
  GoldenKind kind = GoldenKind::kCurve;
  Case item;
};

/// All, by kind. A new one is a line of golden_specs.cc.
[[nodiscard]] const std::vector<GoldenSpec>& golden_specs();

/// Those that any of the patterns names (`*` and `?` as in a shell), in the order of the list; all
/// for no pattern.
/// Errors   UsageError with a suggestion for a pattern that names none.
[[nodiscard]] std::vector<GoldenSpec> select_goldens(const std::vector<std::string>& patterns);

/// The command that compares the run tensor by tensor with one process, up to the step of line
/// `index`.
[[nodiscard]] std::string look_further(const GoldenSpec& spec, std::size_t index);

}  // namespace isoshard
