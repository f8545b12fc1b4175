// SPDX-License-Identifier: Apache-2.0
/// Finds dumped runs in a folder, and which of them is the trusted one of another.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "harness/bundle/run_settings.h"

namespace isoshard {

struct DumpedPair {
  std::filesystem::path reference, actual;
  /// The name of the reference's folder, where the run is judged against several; else empty.
  std::string against = {};
};

/// A folder of which no verdict says anything.
struct NotJudged {
  std::filesystem::path path;
  std::string why;  ///< "a reference", "the emulation of autotp", "no bundle"
};

struct DumpedRuns {
  std::vector<DumpedPair> pairs = {};
  std::vector<NotJudged> not_judged = {};  ///< by name
};

/// The bundles in `folder`: each run with every plain reference whose settings are its own. There
/// are several only where inputs of some came from files (setting_differences, which is given
/// `batch_file`). What a bundle calls itself decides whether it is judged, so a name that spares it
/// the judge must fit what else lies there. Errors   UsageError if there is no run; FileError for a
/// malformed manifest; for a run without a
///          reference, with what differs; for a reference or an emulation that is not of one
///          process, or that no run has; and for a second reference with the same settings.
[[nodiscard]] DumpedRuns dumped_pairs(const std::filesystem::path& folder,
                                      BatchFileOf batch_file = BatchFileOf::kTrusted);

/// "2 folders were not judged: reference_qwen2 (a reference), emulated_qwen2 (the emulation of
/// autotp)"; empty for none.
[[nodiscard]] std::string words_of(const std::vector<NotJudged>& not_judged);

}  // namespace isoshard
