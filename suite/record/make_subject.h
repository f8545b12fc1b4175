// SPDX-License-Identifier: Apache-2.0
/// From a case to the subject of one rank, and to what the subject declares.
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
#include "subjects/parallel/numerics_spec.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {

/// What the case's subject says about its own arithmetic.   Errors   UsageError for a subject that
/// says nothing.
[[nodiscard]] NumericsSpec numerics_of(const Case& item);
/// Whether numerics_of(item) has an answer.
[[nodiscard]] bool declares_numerics(const Case& item);

/// Ranks    collective over rank.comm() (it makes the mesh).
/// Errors   UsageError if the plan is to be edited and the subject has none.
[[nodiscard]] std::unique_ptr<Subject> make_subject(const Case& item, Rank& rank, Sink* sink,
                                                    const SubjectEdits& edits = {});

}  // namespace isoshard
