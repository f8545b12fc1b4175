// SPDX-License-Identifier: Apache-2.0
/// From the options of `train` to the runs it makes.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "app/options/verify_inputs.h"
#include "fixtures/cases/case.h"
#include "harness/cli/options.h"

namespace isoshard {

struct TrainRequest {
  /// One a subject, validated, all of one reference; without the reference itself.
  std::vector<Case> cases;
  Case reference;     ///< the run that all of them are judged against
  std::string fault;  ///< empty: none
  bool runs_reference = true;
  std::filesystem::path reference_curve;  ///< empty: the reference is trained, or nothing is judged
  int perturbed_runs = 0;
  int check_interval = 10;
  int log_interval = 0;              ///< steps between two printed lines; 0: none
  std::filesystem::path output_dir;  ///< empty: nothing is written
  InputFiles inputs;
  /// Flags that make `verify` look at the same case, but for subject, degrees and steps.
  std::vector<std::string> verify_flags;
  std::vector<std::string> notes;  ///< what is told before anything runs
};

void declare_train_options(OptionTable& table);

/// Errors   UsageError and FileError: everything that is wrong with settings and input files,
///          before any rank starts.
[[nodiscard]] TrainRequest train_request_of(const ParsedOptions& options);

/// The command that compares the first `steps` steps of a case tensor by tensor.
[[nodiscard]] std::string look_further(const TrainRequest& request, const Case& item, int steps);

}  // namespace isoshard
