// SPDX-License-Identifier: Apache-2.0
/// Injects faults of the catalog one after the other and says of each whether it was found as it
/// must be: what `isoshard faults` does, as a function.
#pragma once
#include <string>
#include <vector>

#include "harness/report/report.h"
#include "suite/faults/fault.h"
#include "suite/verify/verify_observer.h"

namespace isoshard {

/// Why the verdict on a run with a fault is not the one that the catalog asks for: no alarm,
/// another first tensor, rank or cause; for a benign variation any alarm. Empty: it is.
[[nodiscard]] std::string missed(const Fault& fault, const Verdict& verdict);

/// The smallest case of each fault, with the fault. Each case of the report has
/// ReportCase::detection set; its exit code is 0 where the fault was found.
///
/// Ranks    called by the controller.
/// Errors   UsageError for an unknown id, or for none.
[[nodiscard]] Report detect_faults(const std::vector<std::string>& ids, VerifyObserver& observer);

/// Head of the table that the cases of inject_catalog make as text.
[[nodiscard]] std::string head_of_faults_table();

/// Each fault on its smallest case, in fp32 and in bf16 where the case and the fault are possible
/// in both. Each case of the report has a row (ReportDetection::Row); its exit code is 0 where the
/// fault was alarmed, the first tensor is the catalog's and, on the smallest case itself, the cause
/// is, too. The summary counts, says how long all took, and what was left out in a dtype because
/// the fault changes no value there. Cases that share a reference or an emulation run it once.
///
/// Ranks, Errors   as detect_faults.
[[nodiscard]] Report inject_catalog(const std::vector<std::string>& ids, VerifyObserver& observer);

}  // namespace isoshard
