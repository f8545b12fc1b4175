// SPDX-License-Identifier: Apache-2.0
/// For tests of causes: what the judge says of a made-up run with dp 2 and tp 3.
#pragma once
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "harness/judge/judge.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard::causes_testing {

inline const MeshShape kMesh({{Axis::kDp, 2}, {Axis::kTp, 3}});
inline constexpr int kTp = 3;

/// The first finding's cause; the run must diverge from the right one.
inline Cause cause_of(const synthetic::Body& right, const synthetic::Body& wrong,
                      JudgePolicy options = {}) {
  const Reference r = synthetic::reference(right);
  const Trace trace = synthetic::run(kMesh, &r, wrong);
  options.rtol = 1e-6;
  const Verdict verdict = judge(r, trace, options);
  EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  return verdict.findings.at(0).cause;
}

/// What the ranks of a run make of the right value, by their places on dp and on tp.
using RankChange = std::function<at::Tensor(at::Tensor, int, int)>;

/// What changes nothing on the one process of the reference, and is called on every rank of the
/// run.
inline at::Tensor changed(const RankChange& change, const at::Tensor& value, int rank, bool whole) {
  return whole ? value : change(value.clone(), rank / kTp, rank % kTp);
}

/// One tensor that all ranks hold.
inline Cause cause_of_one(RecordKind kind, const at::Tensor& value, const RankChange& change,
                          const std::string& name = "m.x") {
  const auto body = [&](bool whole) {
    return synthetic::Body([=](Sink& sink, int rank) {
      sink.on_record(synthetic::site(kind, name, synthetic::layout_of(value.sizes().vec())),
                     changed(change, value, rank, whole));
    });
  };
  return cause_of(body(true), body(false));
}

inline void set_first(at::Tensor& tensor, double value) {
  tensor.view({-1}).select(0, 0).fill_(value);
}

}  // namespace isoshard::causes_testing
