// SPDX-License-Identifier: Apache-2.0
/// Judging one bundle against another.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "harness/bundle/bundle.h"
#include "harness/bundle/run_settings.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

class Comparer;

enum class DifferentSettings : std::uint8_t { kRefused, kAllowed };

/// What whoever compares says of the judged run. Nothing of it is ever taken from the judged
/// bundle.
struct BundleRules {
  /// Also of runs that do not say theirs.
  DifferentSettings different = DifferentSettings::kRefused;
  /// kEither: a judged run whose batches come from a file need not have drawn them as the trusted
  /// one did, and where its sampler and its masks stand is not compared.
  BatchFileOf batch_file = BatchFileOf::kTrusted;
  /// As JudgePolicy::activation_grad_scale, before what the trusted bundle says.
  std::optional<double> grad_scale = {};
  std::vector<std::string> not_recorded = {};  ///< as JudgePolicy; also of what only the run has
  /// Patterns and steps of what the judged run need have; empty: all. Data ids are never left out.
  std::vector<std::string> only = {};
  std::vector<int> steps = {};
  std::vector<std::string> partial = {};  ///< as JudgePolicy, beside what the trusted run says
  std::optional<MeshShape> mesh = {};     ///< that the judged run must have
};

/// Judges the run in bundle `actual` against the one in `reference`; a reference of several ranks
/// is put together first. Without rtol and stored responses every tensor must be equal. What is
/// demanded of the judged run comes from the trusted bundle's settings and records and from
/// `rules`: gradient scales, the coarsest dtype, the mask, partial sums, ranks and records. Layouts
/// that the judged bundle leaves to be inferred are found first (infer_layouts). `comparer`, if not
/// null, compares the tensors of ranks with the reference; sums that ranks hold the summands of,
/// and what is inferred or checked before, are made on this CPU all the same.
///
/// Guarantees   the verdict of judge() on the run and the reference that were written, if these
///              settings were judged with. What `rules` allowed stands in the verdict's notes.
/// Errors       as read_bundle (harness/bundle/bundle.h); UsageError that names each training
///              setting in which the runs differ, unless they may; FileError if one of them states
///              none, if copies in the reference differ, if its responses do not fit its tensors,
///              if it has dropout and no masks, and as require_honest_layouts.
[[nodiscard]] Verdict compare_bundles(const std::filesystem::path& reference,
                                      const std::filesystem::path& actual, JudgePolicy policy,
                                      const BundleRules& rules = {}, Comparer* comparer = nullptr);

}  // namespace isoshard
