// SPDX-License-Identifier: Apache-2.0
/// What the rows of a study say together: tables in Markdown, and the lines of a figure.
#pragma once
#include <string>
#include <vector>

#include "harness/plot/share_figure.h"
#include "suite/study/study.h"

namespace isoshard {

/// What each check sees: by point, by magnitude, by extent; of what isoshard alarms whether the
/// first finding is the changed tensor, and whether its cause is the bug; and how many clean runs
/// each check alarms. Only rows whose bug changed a bit count.
[[nodiscard]] std::string study_tables(const std::vector<StudyRow>& rows);

/// The null set: which causes are given for noise that is alarmed within tolerances, and whether
/// they only tell its place. Only rows whose noise changed a bit count.
[[nodiscard]] std::string noise_table(const std::vector<StudyRow>& rows);

/// The shares of alarms by magnitude, one line a check: of changes of all elements or a quarter of
/// what a rank has of a tensor, and of one element.
[[nodiscard]] std::vector<SharePanel> sensitivity_panels(const std::vector<StudyRow>& rows);

/// Clean runs that isoshard alarms, bugs that are visible in the records and that it does not
/// alarm, and noise that is given a cause: all must be 0.
struct StudyFailures {
  std::int64_t false_alarms = 0, missed = 0, caused_noise = 0;
  [[nodiscard]] bool any() const noexcept {
    return false_alarms != 0 || missed != 0 || caused_noise != 0;
  }
};
[[nodiscard]] StudyFailures failures_of(const std::vector<StudyRow>& rows);

}  // namespace isoshard
