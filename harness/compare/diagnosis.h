// SPDX-License-Identifier: Apache-2.0
/// From a divergent tensor's bytes to a likely cause, in the words of the fault catalogue.
#pragma once
#include <string>
#include <vector>

#include "harness/compare/tensor_judge.h"

namespace isoshard::detail {

/// The likely cause of one tensor's divergence; empty if no pattern fits. A pattern fits when it leaves less than a
/// quarter of the error and no more than a few tolerances.
///
///   not updated (bitwise as before) | stale by n steps
///   rank-local partial over AXIS (n copies differ, their sum equals the reference)
///   rank-local over AXIS (n copies differ; combined they give the reference)
///   scale k = formula of the mesh's degrees
///   [copies differ over AXIS; ] rank r holds positions a..b twice | shift n along dim d | permuted along dim d
///   constant offset x [= log(AXIS) | = log(padded/true), of a scalar] | off by the same row everywhere | permuted
///   copies differ over AXIS
[[nodiscard]] std::string diagnose(const Reference& reference, const Record& reference_record, const Trace& actual,
                                   const std::vector<Held>& held, const TensorResult& result);

}  // namespace isoshard::detail
