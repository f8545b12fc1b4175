// SPDX-License-Identifier: Apache-2.0
/// A run on disk, and what the trusted side's word for it is.
#pragma once
#include <filesystem>

#include "harness/bundle/bundle.h"
#include "harness/bundle/run_settings.h"
#include "harness/ids/rule.h"
#include "harness/trace/judge_policy.h"

namespace isoshard {

/// One bundle and what it says of its run.
struct SavedRun {
  /// Errors   as read_bundle and parse_run_settings.
  explicit SavedRun(std::filesystem::path folder);

  /// Errors   FileError, always: "FOLDER/manifest.json: TEXT".
  [[noreturn]] void refuse(RuleId id, NamedValues values = {}) const;

  std::filesystem::path manifest;
  Bundle bundle;
  RunSettings settings;
};

/// What floors must allow for: what the settings say, else the coarsest floating dtype of any
/// record.
[[nodiscard]] Dtype coarsest_dtype(const RunSettings& settings, const Trace& trace);

/// How a run is compared with this reference while it is recorded.
[[nodiscard]] JudgePolicy recording_policy(const RunSettings& settings, const Trace& reference);

/// Whether steps of small gradients are left out: what the settings say, else whether the optimizer
/// is Adam's, whose step is a sign where the gradient is noise.
[[nodiscard]] bool masks_small_gradients(const RunSettings& settings);

/// The trusted run as one process would have done it, without its responses. The run's trace is
/// moved out.
/// Errors   FileError if the run leaves layouts to be inferred, lacks a tensor, or if its ranks
///          hold different copies of one.
[[nodiscard]] Reference reference_of(SavedRun& trusted);

/// With the responses and redrawn runs of its bundle, which are moved out.
/// Errors   FileError as require_fitting_responses.
[[nodiscard]] Reference with_responses(Reference reference, SavedRun& trusted);

}  // namespace isoshard
