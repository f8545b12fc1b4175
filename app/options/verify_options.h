// SPDX-License-Identifier: Apache-2.0
/// From the options of `verify` to the list of cases to run.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "app/options/verify_inputs.h"
#include "fixtures/cases/case.h"
#include "harness/cli/options.h"
#include "suite/verify/verify_case.h"

namespace isoshard {

struct VerifyRequest {
  std::vector<Case> cases;           ///< validated; in the order of order_for_tables
  std::string fault;                 ///< empty: none
  std::filesystem::path dump;        ///< empty: no bundles
  std::filesystem::path output_dir;  ///< empty: nothing is written
  InputFiles inputs;
  ReferenceKind reference = ReferenceKind::kAuto;
  bool fail_fast = false;              ///< no case runs after one that is not as it should be
  int repeat = 1;                      ///< runs of each subject
  Strength require = Strength::kNone;  ///< what each verdict must be at least
  bool tables = false;                 ///< put the runs side by side at the end
  bool local_tables = false;           ///< with what rank 0 alone holds
  bool wants_tables = false;           ///< the user asked for them
  bool coverage = false;               ///< nothing is run: what the cases exercise is told
  std::vector<std::string> notes;      ///< what is told before anything runs
};

void declare_verify_options(OptionTable& table);

/// Errors   UsageError and FileError: everything that is wrong with settings and input files,
///          before any rank starts.
[[nodiscard]] VerifyRequest verify_request_of(const ParsedOptions& options);

}  // namespace isoshard
