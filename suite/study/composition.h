// SPDX-License-Identifier: Apache-2.0
/// Random bugs that no catalog lists: an operator, a place, ranks, an extent and a magnitude.
#pragma once
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "fixtures/cases/case.h"
#include "fixtures/cases/draws.h"
#include "harness/trace/stage.h"
#include "suite/faults/injection.h"

namespace isoshard {

/// Whether bugs are drawn with a magnitude for it: scale, shift and noise.
[[nodiscard]] bool has_magnitude(FaultChange change) noexcept;

/// From large to a thousandth.
inline constexpr std::array kMagnitudes = {1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001};

/// The places that a run of a case has.
struct StudyTags {
  std::vector<std::string> forward, backward, parameters;
  std::vector<CalledFor> collectives;
};

/// "scale 0.01 of one element at backward of model.layers.0.mlp on tp rank 1".
[[nodiscard]] std::string study_words(const Injection& composition);

/// The record that must be the first wrong one; nothing where that depends on what a collective
/// carries.
struct StudyPlace {
  Stage stage = Stage::kForward;
  std::string name = {};
};
[[nodiscard]] std::optional<StudyPlace> place_of(const Injection& composition);

/// The small cases that bugs are put on: every subject, fp32 and bf16 with fp32 masters, SGD and
/// AdamW.
[[nodiscard]] std::vector<Case> study_cases();

/// Requires   tags that have something for each point.
[[nodiscard]] Injection draw_composition(Draws& draws, const Case& item, const StudyTags& tags);
/// The same with noise as its change: errors that have a place, and no cause.
[[nodiscard]] Injection draw_noise(Draws& draws, const Case& item, const StudyTags& tags);

}  // namespace isoshard
