// SPDX-License-Identifier: Apache-2.0
/// How far a reference on disk moves: measured by perturbed runs on disk.
#pragma once
#include <filesystem>
#include <vector>

#include "harness/bundle/bundle.h"

namespace isoshard {

/// Compares each perturbed run, whose weights were moved by one ulp, with the reference, and writes
/// what they move by as the responses of the reference's bundle (responses.json, and its hash in
/// manifest.json), in the place of older ones. Runs of several ranks are put together first.
///
/// Returns   how many records have a response.
/// Errors    as read_bundle and reference_of (harness/judge/saved_run.h); UsageError if there is no
///           perturbed run, or one has other training settings; FileError if a perturbed run lacks
///           a record of the reference, read other data, or is the reference itself: with equal
///           weights it shows no response. Nothing is written then.
[[nodiscard]] std::size_t respond_bundles(const std::filesystem::path& reference,
                                          const std::vector<std::filesystem::path>& perturbed);

}  // namespace isoshard
