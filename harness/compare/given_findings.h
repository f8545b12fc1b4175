// SPDX-License-Identifier: Apache-2.0
/// Findings of another program about the judged run, such as those of the Python package about
/// samples. The judge adds them to its own, so that one program decides and writes every report.
#pragma once
#include <filesystem>
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
  std::vector<Finding> findings;        ///< each of them makes the run diverge
  std::vector<GivenCause> causes;       ///< used only where a run diverges
  std::vector<std::string> notes = {};  ///< sentences for the notes of any verdict
};

/// Reads the file of --findings (docs/report.md).
/// Errors   FileError that starts with the file: it is missing, malformed, or of another schema.
[[nodiscard]] GivenFindings read_given_findings(const std::filesystem::path& file);

/// Adds them to a verdict. A finding comes before the verdict's own ones of its step and stage; a
/// run that conformed, or was vacuous, diverges with it. A cause becomes the diagnosis of the first
/// finding, or a note where that finding shows earlier than the cause.
void add_given_findings(const GivenFindings& given, Verdict& verdict);

}  // namespace isoshard
