// SPDX-License-Identifier: Apache-2.0
/// What of a judged run was not judged because of its own words.
#pragma once
#include "harness/bundle/run_settings.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// Adds to the verdict on two bundles what they say that spared the judged run something: that its
/// inputs come from a file, which excuses its sampler, its random state and how its inputs were
/// made (setting_differences, which was given `batch_file`); and a subject or mesh without an entry
/// in the trusted run's table of collectives, which excuses its calls and what its later forward
/// passes read. A note names the side that says so. Where it is the judged run alone, the reason of
/// a verdict that conforms says it, too.
void add_own_word(const RunSettings& trusted, const RunSettings& judged, BatchFileOf batch_file,
                  Verdict& verdict);

}  // namespace isoshard
