// SPDX-License-Identifier: Apache-2.0
/// Judging one bundle against another.
#pragma once
#include <cstdint>
#include <filesystem>

#include "harness/verdict/verdict.h"

namespace isoshard {

enum class DifferentSettings : std::uint8_t { kRefused, kAllowed };

/// Judges the run in bundle `actual` against the one in `reference`; a reference of several ranks
/// is put together first. Without rtol and stored responses every tensor must be equal. What the
/// bundles' settings say of judging replaces what `policy` says: the trusted run's word counts
/// before the judged run's, but for the gradient scale, which is of the judged run. Without it the
/// coarsest dtype is that of the records.
///
/// Guarantees   the verdict of judge() on the run and the reference that were written, if these
///              settings were judged with.
/// Errors       as read_bundle (harness/bundle/bundle.h); UsageError that names each training
///              setting in which the runs differ, unless they may.
[[nodiscard]] Verdict compare_bundles(const std::filesystem::path& reference,
                                      const std::filesystem::path& actual, JudgePolicy policy,
                                      DifferentSettings different = DifferentSettings::kRefused);

}  // namespace isoshard
