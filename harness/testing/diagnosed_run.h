// SPDX-License-Identifier: Apache-2.0
/// For tests of causes: what the judge says of a made-up run with dp 2 and tp 3.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "harness/judge/judge.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard::causes_testing {

inline const MeshShape kMesh({{Axis::kDp, 2}, {Axis::kTp, 3}});
inline constexpr int kTp = 3;

/// The first finding's diagnosis; the run must diverge from the right one.
inline std::string diagnosis_of(const synthetic::Body& right, const synthetic::Body& wrong,
                                JudgePolicy options = {}) {
  const Reference r = synthetic::reference(right);
  const Trace trace = synthetic::run(kMesh, &r, wrong);
  options.rtol = 1e-6;
  const Verdict verdict = judge(r, trace, options);
  EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  return verdict.findings.empty() ? "no finding" : verdict.findings[0].diagnosis;
}

}  // namespace isoshard::causes_testing
