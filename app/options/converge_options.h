// SPDX-License-Identifier: Apache-2.0
/// From the options of `converge` to control and test sets.
#pragma once
#include "app/options/verify_inputs.h"
#include "harness/cli/options.h"
#include "suite/converge/converge.h"

namespace isoshard {

struct ConvergeRequest {
  ConvergePlan plan;
  InputFiles inputs;
};

void declare_converge_options(OptionTable& table);

/// Errors   UsageError and FileError: everything that is wrong with settings and input files, and
///          every rule of the guideline that is broken, by its name, before any rank starts.
[[nodiscard]] ConvergeRequest converge_request_of(const ParsedOptions& options);

/// With --attach: leaves out, with a note, test sets that need more ranks than there are.
/// Errors   UsageError if none is left, or the control does not fit.
void fit_to_job(const ParsedOptions& options, ConvergePlan& plan);

}  // namespace isoshard
