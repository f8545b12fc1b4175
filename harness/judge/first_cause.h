// SPDX-License-Identifier: Apache-2.0
/// The causes of a verdict's findings, and what is said around that of the first.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "harness/ids/cause.h"
#include "harness/judge/rules/judged_run.h"
#include "harness/verdict/verdict.h"

namespace isoshard::detail {

/// The cause of each finding that was diagnosed.
using Causes = std::map<RecordKey, Cause>;

/// Gives each finding the cause that fits its tensor (diagnose). Diagnosing reads whole tensors:
/// all findings of the first one's step and stage are diagnosed, as the first diagnosis says how
/// many share its cause, and of the later ones the first 400 that are not large. A gradient that
/// goes wrong between micro-batches has the cause of the final one, or its own. `findings`   in the
/// order of the verdict
[[nodiscard]] Causes diagnose_findings(std::vector<OrderedFinding>& findings, const JudgedRun& run);

/// What stands around the first finding belongs to its cause: whether everything earlier is right,
/// and how many tensors of the same kind share it. Both are values of the cause (`forward`,
/// `gradients`, `same`, `same_of`), and stand in the diagnosis. Without a diagnosis it is given
/// that of another finding of its step and stage, and said to be of that tensor; nothing, if none
/// has one.
void summarise_first(Verdict& verdict, const Causes& causes);

/// "; the same for 2 of 6 (q_proj.weight)": the values `same`, `same_of` and `same_kinds` that
/// summarise_first() gives a cause; empty if it gave none.
[[nodiscard]] std::string words_of_shared(const NamedValues& values);

/// Where data differ, judging stops: what a run computes from other samples says nothing about it.
/// Takes away the findings and tensors that follow the first step whose data have a finding, and
/// notes how many. Data that were not recorded are not other data.
void stop_at_wrong_data(Verdict& verdict);

}  // namespace isoshard::detail
