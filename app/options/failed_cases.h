// SPDX-License-Identifier: Apache-2.0
/// The option --failed-from: what an earlier report says was wrong, to be run again.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "harness/cli/options.h"

namespace isoshard {

/// The cases of a stored report that are not as they should be, and how to run them.
struct FailedCases {
  std::vector<std::string> words;  ///< options of the run, without program and command
  std::vector<std::string> cases;  ///< slugs
};

/// Of DIR/report.json, or of the file.
/// Errors   FileError if it is not a report of `verify` that says how it was made; UsageError if
///          every case conforms.
[[nodiscard]] FailedCases failed_cases_of(const std::filesystem::path& input);

/// `given` before the options of the earlier run: one that both have counts as given now.
[[nodiscard]] std::vector<std::string> merged_options(const std::vector<std::string>& given,
                                                      const std::vector<std::string>& earlier);

/// The options of a call with those of the run that --failed-from names put under them.
/// Errors   as failed_cases_of and parse_options.
[[nodiscard]] ParsedOptions with_options_of(const FailedCases& failed, const OptionTable& table,
                                            const ParsedOptions& given);

}  // namespace isoshard
