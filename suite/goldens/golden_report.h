// SPDX-License-Identifier: Apache-2.0
/// Records, reviews, accepts, lists and verifies goldens: what `isoshard golden` does, as
/// functions.
#pragma once
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "harness/golden/golden_mode.h"
#include "harness/report/report.h"

namespace isoshard {

/// Which goldens, where they are, and what to do with them.
struct GoldenPlan {
  std::vector<std::string> names;  ///< `*` and `?` as in a shell; empty: all, or all pending ones
  std::filesystem::path accepted = default_golden_folder();
  std::filesystem::path pending = default_pending_folder();
  std::string reason;    ///< accept: what changed the numbers
  bool removes = false;  ///< accept: takes the named goldens off the list
  int most_ranks = 0;    ///< verify: a golden that needs more is skipped; 0: none is
  std::string fault;     ///< record, verify: the id of a fault to inject; empty: none
};

/// Called as the report grows. Each may be empty.
struct GoldenObserver {
  std::function<void(const std::string& line)> on_note = {};
  std::function<void(const std::string& name)> on_start = {};  ///< a golden is about to be run
  std::function<void(const ReportGolden&)> on_golden = {};
};

// An error ends one golden, not the rest: it is reported as refused or incomplete. After an
// interrupt the report has what was done until then, and exit code 130 or 143.
// Errors   UsageError for a name that selects nothing, and for an unknown fault.
// Ranks    called by the controller.

/// Runs goldens; the numbers are pending, and not accepted.
/// Errors   GoldenError where CI is set.
[[nodiscard]] Report record_goldens(const GoldenPlan& plan, const GoldenObserver& observer = {});

/// Shows pending goldens beside the accepted ones.
[[nodiscard]] Report review_goldens(const GoldenPlan& plan, const GoldenObserver& observer = {});

/// Takes pending goldens, or takes goldens off the list.
/// Errors   GoldenError where CI is set.
[[nodiscard]] Report accept_goldens(const GoldenPlan& plan, const GoldenObserver& observer = {});

/// Lists goldens, and what is in the folder and should not be. Nothing is run.
[[nodiscard]] Report list_goldens(const GoldenPlan& plan, const GoldenObserver& observer = {});

/// Runs goldens and compares them with the accepted ones.
[[nodiscard]] Report verify_goldens(const GoldenPlan& plan, const GoldenObserver& observer = {});

}  // namespace isoshard
