// SPDX-License-Identifier: Apache-2.0
/// Listens while cases are verified: for a progress line, to print as it goes, to write bundles.
#pragma once
#include "fixtures/cases/case.h"
#include "harness/report/report.h"
#include "harness/trace/reference.h"
#include "harness/trace/trace.h"

namespace isoshard {

/// Every function may be left as it is. None of them changes what is run or judged; an exception
/// ends the case, or if it is not an InfrastructureError the verification.
class VerifyObserver {
 public:
  VerifyObserver() = default;
  VerifyObserver(const VerifyObserver&) = delete;
  VerifyObserver& operator=(const VerifyObserver&) = delete;
  virtual ~VerifyObserver() = default;

  /// The case is about to be run.
  virtual void on_case(const Case& /*item*/) {}
  /// The plain reference of the case was made, or is used for the first time.
  virtual void on_plain(const Case& /*item*/, const Reference& /*reference*/) {}
  /// The emulated reference of the case was made.
  virtual void on_emulated(const Case& /*item*/, const Reference& /*reference*/) {}
  /// The subject ran. It may run several times for one verdict.
  virtual void on_run(const Case& /*item*/, const Trace& /*trace*/) {}
  /// Something to tell beside the verdicts.
  virtual void on_note(const std::string& /*line*/) {}
  /// The case was judged, or could not be.
  virtual void on_judged(const ReportCase& /*item*/) {}
};

}  // namespace isoshard
