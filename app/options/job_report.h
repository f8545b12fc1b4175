// SPDX-License-Identifier: Apache-2.0
/// One report for a job, each process of which has judged.
#pragma once
#include <functional>

#include "harness/report/report.h"
#include "harness/world/launcher.h"

namespace isoshard {

/// Where a process found worse than process 0, process 0 gets a case that says which process and
/// what, and its report the exit code of the job. So what is printed and written says how the job
/// ends. A process that has left before it could tell counts as infrastructure. `show` is called
/// with such a case.
///
/// Ranks   with Launcher::peers collective over them, when each has its report; without, nothing.
void agree_on_report(Launcher& launcher, Report& report,
                     const std::function<void(const ReportCase&)>& show);

}  // namespace isoshard
