// SPDX-License-Identifier: Apache-2.0
/// A test set of a convergence test: what a run has that its control, 1D FSDP, has not.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "fixtures/cases/case.h"
#include "fixtures/cases/setting.h"

namespace isoshard {

/// The subject of the control set: FSDP alone. It is a row of its own and not the judged subject
/// with degrees of 1, so that nothing that is put into the judged runs reaches it.
inline constexpr std::string_view kControlSubject = "fsdp_tp";
/// The subject of the test sets.
inline constexpr std::string_view kTestSubject = "nd";

struct TestSet {
  std::string text;                     ///< as it was asked for: "tp=2,pp=2"
  std::string title;                    ///< "FSDP 2, TP 2, PP 2", as the guideline writes it
  std::string name;                     ///< for files: "fsdp2_tp2_pp2"
  int dimensions = 1;                   ///< axes with a degree above 1, data parallelism included
  std::vector<std::string> techniques;  ///< "recompute", "pipeline-schedule=GPipe"
  std::vector<std::string_view> settings;  ///< the rows (fixtures/cases/setting.h) that it sets
  Case item;                               ///< of the control's seed
};

/// From "tp=2,pp=2,recompute" to a run: the control's case, its local batch cut into micro-batches,
/// with these degrees and techniques. Keys are tp, pp, cp, micro-batches, and the flags of the
/// settings that the judged subject takes and a reference does not depend on; a switch has no
/// value.
///
/// A pipeline has as many micro-batches as stages unless micro-batches=N says otherwise.
/// Requires   control has one micro-batch.
/// Errors     UsageError: an unknown key (with a suggestion), a technique that this build lacks
/// (with
///            what there is), a key twice, a wrong value, dp, or a local batch that the
///            micro-batches do not divide.
[[nodiscard]] TestSet test_set(std::string_view text, const Case& control);

/// "FSDP 2": the title of the control set.
[[nodiscard]] std::string control_title(const Case& control);

/// The techniques that a test set can have, by flag: in the order of the table of settings.
[[nodiscard]] std::vector<std::string> technique_names();
/// Whether the flag of this row is a technique: the judged subject takes it, and the reference does
/// not depend on it.
[[nodiscard]] bool is_technique(const Setting& setting);

/// The titles of the sets that a conforming run of `set` implies: fewer of its axes, with the same
/// degrees ("for mutually compatible parallelisms one can assume the converging of a higher
/// dimensional combination implies that of a lower dimensional subset").
[[nodiscard]] std::vector<std::string> implied_sets(const TestSet& set);

}  // namespace isoshard
