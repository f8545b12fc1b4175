// SPDX-License-Identifier: Apache-2.0
/// The implementations that can be judged, by name.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/observe/sink.h"
#include "fixtures/cases/case.h"
#include "harness/world/rank.h"
#include "harness/world/subject.h"
#include "subjects/parallel/arithmetic.h"
#include "subjects/train/trainer.h"

namespace isoshard {

struct SubjectInfo {
  std::string name;     ///< "autotp"
  std::string summary;  ///< what it copies, in one line
};

[[nodiscard]] std::vector<SubjectInfo> subjects();
/// Errors   UsageError with a suggestion for a name that is not registered.
void require_subject(std::string_view name);
/// What the case's subject says about its own arithmetic.   Errors   UsageError for a subject that
/// says nothing.
[[nodiscard]] Arithmetic arithmetic_of(const Case& item);
/// Whether arithmetic_of(item) has an answer.
[[nodiscard]] bool declares_arithmetic(const Case& item);

/// Changes to a subject from outside: how faults replace its seams by faulty test doubles. Each may
/// be empty. Called on every rank.
struct SubjectEdits {
  /// Before the parts that follow it are made.
  std::function<void(ShardPlan& plan, const Mesh& mesh)> plan;
  std::function<void(TrainerParts& parts, Mesh& mesh)> parts;  ///< after they are made
};

/// Ranks    collective over rank.comm() (it makes the mesh).
/// Errors   UsageError if the plan is to be edited and the subject has none.
[[nodiscard]] std::unique_ptr<Subject> make_subject(const Case& item, Rank& rank, Sink* sink,
                                                    const SubjectEdits& edits = {});

}  // namespace isoshard
