// SPDX-License-Identifier: Apache-2.0
/// Findings of another program about the judged run, such as those of the Python package about
/// samples. The judge adds them to its own, so that one program decides and writes every report.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "harness/verdict/verdict.h"

namespace isoshard {

/// Why a run may diverge although its parallelism is right.
struct GivenCause {
  RecordKey key;  ///< the tensor where it shows first; it explains no finding before that one
  Cause cause;
};

struct GivenFindings {
  std::vector<Finding> findings;  ///< each of them makes the run diverge
  /// Each is added only to a run that diverges at its place or later.
  std::vector<Finding> if_diverging = {};
  std::vector<GivenCause> causes;       ///< used only where a run diverges
  std::vector<std::string> notes = {};  ///< sentences for the notes of any verdict
  /// FILE:LINE of the script's calls by the tensor that they made: STEP/KIND/NAME/CALL
  std::map<std::string, std::string> call_sites = {};

  [[nodiscard]] bool empty() const {
    return findings.empty() && if_diverging.empty() && causes.empty() && notes.empty() &&
           call_sites.empty();
  }
};

/// Reads the file of --findings (docs/reference/report.md).
/// Errors   FileError that starts with the file: it is missing, malformed, or of another schema.
[[nodiscard]] GivenFindings read_given_findings(const std::filesystem::path& file);

/// Adds them to a verdict. A finding comes before the verdict's own ones of its step and stage; a
/// run that conformed, or was vacuous, diverges with it, unless it is one of `if_diverging`. A
/// cause becomes the diagnosis of the first finding, or a note where that finding shows earlier
/// than the cause. Findings get the call site of their tensor.
void add_given_findings(const GivenFindings& given, Verdict& verdict);

}  // namespace isoshard
