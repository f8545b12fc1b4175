// SPDX-License-Identifier: Apache-2.0
/// Random bugs that no catalog lists: an operator, a place, ranks, an extent and a magnitude.
#pragma once
#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/axis.h"
#include "core/comm/collective.h"
#include "fixtures/cases/case.h"
#include "fixtures/cases/draws.h"
#include "harness/trace/stage.h"

namespace isoshard {

/// Where a value is changed: an activation or its gradient as it passes a tap, what comes out of a
/// collective, what a step of the optimizer adds to a parameter.
enum class StudyPoint : std::uint8_t { kForward, kBackward, kCollective, kUpdate };
/// forward, backward, collective, update.
[[nodiscard]] std::string_view name_of(StudyPoint point) noexcept;

/// Those with a magnitude m, x the values and s their root mean square: kScale x (1 + m); kShift x
/// + m s; kNoise x + m s u, u of -1..1. Generic ones without: kZero 0; kRoll each value its
/// neighbor's; kRound to bf16; kSkip the reduction is not made, and each rank keeps its own
/// summand.
enum class StudyChange : std::uint8_t { kScale, kShift, kNoise, kZero, kRoll, kRound, kSkip };
/// scale, shift, noise, zero, roll, round, skip.
[[nodiscard]] std::string_view name_of(StudyChange change) noexcept;
[[nodiscard]] bool has_magnitude(StudyChange change) noexcept;

/// Of what one rank has of a tensor: all, a quarter in a row, one element.
enum class StudyExtent : std::uint8_t { kAll, kPart, kElement };
/// all, part, element.
[[nodiscard]] std::string_view name_of(StudyExtent extent) noexcept;

/// From large to a thousandth.
inline constexpr std::array kMagnitudes = {1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001};

/// What a call of a collective is for.
struct CalledFor {
  CollectiveOp op = CollectiveOp::kAllReduce;
  Purpose purpose = Purpose::kUnspecified;
  Axis axis = Axis::kWorld;
  auto operator<=>(const CalledFor&) const = default;
};

/// The places that a run of a case has.
struct StudyTags {
  std::vector<std::string> forward, backward, parameters;
  std::vector<CalledFor> collectives;
};

struct Composition {
  StudyPoint point = StudyPoint::kForward;
  std::string tag =
      {};  ///< module or parameter; of a collective a parameter, or empty: all it carries
  CalledFor called = {};  ///< of a collective
  StudyChange change = StudyChange::kScale;
  StudyExtent extent = StudyExtent::kAll;
  double magnitude = 0;  ///< 0 for a generic change
  /// On the ranks of this coordinate alone; none: on all.
  std::optional<Axis> axis = {};
  int coordinate = 0;
  double position = 0;  ///< of a part or an element, from 0 to 1

  /// "scale 0.01 of one element at backward of model.layers.0.mlp on tp rank 1".
  [[nodiscard]] std::string words() const;
  /// Whether the rank of a mesh is one of those that go wrong.
  [[nodiscard]] bool is_on(const MeshShape& mesh, int rank) const;
};

/// The record that must be the first wrong one; nothing where that depends on what a collective
/// carries.
struct StudyPlace {
  Stage stage = Stage::kForward;
  std::string name = {};
};
[[nodiscard]] std::optional<StudyPlace> place_of(const Composition& composition);

/// The small cases that bugs are put on: every subject, fp32 and bf16 with fp32 masters, SGD and
/// AdamW.
[[nodiscard]] std::vector<Case> study_cases();

/// Requires   tags that have something for each point.
[[nodiscard]] Composition draw_composition(Draws& draws, const Case& item, const StudyTags& tags);

}  // namespace isoshard
