// SPDX-License-Identifier: Apache-2.0
/// Random bugs, each on one run that isoshard and weaker checks judge: who sees what.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "suite/study/composition.h"
#include "suite/study/grade.h"
#include "suite/study/weak_checks.h"

namespace isoshard {

struct StudyPlan {
  std::uint64_t seed = 1;
  std::int64_t first = 0, count = 200;  ///< compositions first to first + count - 1 of the seed
  int curve_steps = 100;                ///< of training runs; at least 2
  /// Noise alone, the null set of the search for causes: no bug has a cause. isoshard judges it
  /// within tolerances; weaker checks, which say nothing of causes, are left out.
  bool is_noise = false;
  std::vector<Case> cases = study_cases();
};

/// What was said of one run. Of a run without a bug (`composition` is empty) every alarm is false.
struct StudyRow {
  std::int64_t index = -1;  ///< of the composition in its seed's stream; of a clean run below 0
  std::string case_slug = {}, composition = {};  ///< in words
  Injection bug = {};                            ///< but for its position, which no file keeps
  std::vector<int> bug_ranks = {};               ///< that go wrong
  bool fired = false;                            ///< a bit was changed
  bool is_visible = false;  ///< some recorded bit, or a call of a collective, is another one
  bool exact = false;       ///< alarm of `verify`, which knows the declared arithmetic
  bool within = false;      ///< alarm of `verify --reference plain`: tolerances alone
  WeakAlarms weak{};
  /// Whether the first finding is the changed tensor; nothing where it depends on what is carried,
  /// or without an alarm.
  std::optional<bool> exact_place = {}, within_place = {};
  Blame blame = {};            ///< by the verdict within tolerances; empty without an alarm
  std::string diagnosis = {};  ///< the cause of it in words, with its tensor and what is around it

  /// Whether its cause is the bug: of a bug that fired and is alarmed within tolerances.
  [[nodiscard]] CauseGrade grade() const;
};

/// The first two lines of a study's file: what its rows depend on, and the names of its columns.
[[nodiscard]] std::string study_head(const StudyPlan& plan);
/// A row as a line of the file, with its newline.
[[nodiscard]] std::string to_line(const StudyRow& row);
/// The rows of a file; none if there is no file. A last line without a newline, which a killed run
/// has left, is no row.
/// Errors   FileError that names file and line: no line of a study, or one of another seed or
///          another number of steps.
[[nodiscard]] std::vector<StudyRow> read_study(const std::filesystem::path& file,
                                               const StudyPlan& plan);

/// One composition on a case, judged as run_study does; without one, the clean run.
/// Ranks, Errors   as run_study.
[[nodiscard]] StudyRow judge_composition(const Case& item,
                                         const std::optional<Injection>& composition,
                                         int curve_steps);

/// Runs what `known` lacks, one after the other, and calls `add` with each row as soon as it is
/// known: the clean runs of all cases first, then the compositions. An interrupt ends it.
///
/// Each bug's run is recorded once, and its training run made once; all checks judge these.
/// Ranks    called by the controller.
/// Errors   InfrastructureError if a world breaks down.
/// Determinism   a row is a function of seed, index and number of steps.
void run_study(const StudyPlan& plan, const std::vector<StudyRow>& known,
               const std::function<void(const StudyRow&)>& add);

}  // namespace isoshard
