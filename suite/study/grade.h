// SPDX-License-Identifier: Apache-2.0
/// Whether the cause that a verdict gives is the bug that was put into the run.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "harness/ids/cause.h"
#include "suite/study/composition.h"

namespace isoshard {

/// kNotGraded: there is no bug, or no alarm.
/// kRight: the cause names the operator, with its number where it has one, at the changed tensor,
/// and no rank or axis but those that go wrong.
/// kPlaceOnly: at the changed tensor, ranks and axes, and the cause says only that these differ, or
/// how their values look, and not what was done to them.
/// kWrong: a cause of another operator, another number, another tensor, rank or axis.
/// kNone: no cause.
enum class CauseGrade : std::uint8_t { kNotGraded, kRight, kPlaceOnly, kWrong, kNone };
inline constexpr int kNumGrades = 5;
/// Empty for kNotGraded; right, place only, wrong, none.
[[nodiscard]] std::string_view name_of(CauseGrade grade) noexcept;

/// Whether a cause only says where values are wrong, or how they look. Any other one says what was
/// done, which is wrong of noise wherever it is.
[[nodiscard]] bool tells_only_the_place(CauseId cause);

/// What the first finding of a verdict says of a bug.
struct Blame {
  /// Whether the cause is one of the changed tensor; nothing where that depends on what a
  /// collective carries.
  std::optional<bool> at_place = {};
  std::vector<int> ranks = {};  ///< of the finding
  Cause cause = {};
};

/// Grades an alarmed run. grade.cc has the table of causes that are right, or name the place alone.
/// A cause that is not in it for the composition's place, change and extent is wrong. A cause given
/// for noise is wrong unless it only names the place.
///
/// `wrong_ranks`   the ranks that the composition is on.
[[nodiscard]] CauseGrade grade_of(const Injection& composition, std::span<const int> wrong_ranks,
                                  const Blame& blame);

}  // namespace isoshard
