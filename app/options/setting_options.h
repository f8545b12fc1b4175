// SPDX-License-Identifier: Apache-2.0
/// The flags of the table of settings (fixtures/cases/setting.h).
#pragma once
#include <span>
#include <string_view>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/cli/options.h"

namespace isoshard {

/// One option for each row that has a flag, in the row's group of --help, and its aliases.
/// `without` names flags that mean something else in a command, which declares them itself.
void declare_setting_options(OptionTable& table, std::span<const std::string_view> without = {});

/// Every given flag of a setting that all subjects take changes every case, in the order of the
/// table, but for those of `without`.
/// Errors   UsageError: what is wrong with a value.
void apply_setting_options(const ParsedOptions& options, std::vector<Case>& cases,
                           std::span<const std::string_view> without = {});

/// A given flag of a setting that only some subjects take changes the cases of these subjects.
/// Errors   UsageError for a flag that the subject of no case takes, and as above.
void apply_subject_options(const ParsedOptions& options, std::vector<Case>& cases);

}  // namespace isoshard
