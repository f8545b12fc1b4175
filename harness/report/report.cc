// SPDX-License-Identifier: Apache-2.0
/// Which exit code a report has.
#include "harness/report/report.h"

#include <utility>

namespace isoshard {

Status ReportCase::status() const noexcept {
  return verdict.has_value() ? verdict->status : Status::kIncomplete;
}

int ReportCurve::exit_code() const noexcept {
  if (!failure.empty()) return kExitInfrastructure;
  return verdict.has_value() ? exit_code_of(verdict->status) : kExitConforms;
}

ReportCase& Report::add(ReportCase item) {
  exit_code = combine_exit_codes(exit_code, exit_code_of(item.status()));
  return cases.emplace_back(std::move(item));
}

ReportCurve& Report::add(ReportCurve item) {
  exit_code = combine_exit_codes(exit_code, item.exit_code());
  return curves.emplace_back(std::move(item));
}

ReportExperiment& Report::add(ReportExperiment item) {
  exit_code = combine_exit_codes(exit_code, item.holds ? kExitConforms : kExitDiverges);
  return experiments.emplace_back(std::move(item));
}

ReportGolden& Report::add(ReportGolden item, int code) {
  exit_code = combine_exit_codes(exit_code, code);
  return goldens.emplace_back(std::move(item));
}

}  // namespace isoshard
