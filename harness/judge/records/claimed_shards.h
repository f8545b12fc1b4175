// SPDX-License-Identifier: Apache-2.0
/// What a judged bundle says of copies: that they are none, but parts.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "harness/trace/judge_policy.h"
#include "harness/trace/trace.h"

namespace isoshard::detail {

/// Holds to each other what a run says of parameters, their gradients and the optimizer's states
/// along the axes whose ranks have other data (dp and its halves, cp). A rank that calls its copy a
/// part shows a part of it, and the rest may have drifted. So:
///
/// - who cuts a tensor cuts what is as large: a copy of at least as many elements, of the same kind
///   in the same step, is a contradiction. Systems that cut leave small tensors whole, not large
///   ones;
/// - parts must be gathered or scattered: where the trusted side says what the run's ranks call
///   (JudgePolicy::collectives), an axis along which nothing but sums are called cuts nothing.
///
/// Errors   FileError that starts with `file` and names both tensors, or the axis; not of tensors
///          that `allowed` names (matches_any).
void require_consistent_shards(const Trace& run, const JudgePolicy& policy,
                               const std::vector<std::string>& allowed,
                               const std::filesystem::path& file);

}  // namespace isoshard::detail
