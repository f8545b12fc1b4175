// SPDX-License-Identifier: Apache-2.0
/// A run may not call its copies parts, so that what drifted is not shown.
#include "harness/judge/records/claimed_shards.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/error.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;

const MeshShape kDpByTp({{Axis::kDp, 2}, {Axis::kTp, 2}});

/// Which tensors of four dp x tp ranks are cut along dp. The matrix is cut along tp, too.
struct CutAlongDp {
  bool matrix = false, norm = false, tiny = false;
  RecordKind kind = RecordKind::kGrad;
};

Trace cut_run(const CutAlongDp& cut) {
  return run(
      kDpByTp, nullptr,
      [=](Sink& sink, int rank) {
        const auto record = [&](RecordKind kind, const std::string& name, Shape shape, bool is_cut,
                                std::vector<Placement> placements) {
          const Shape whole = shape;
          if (!placements.empty()) shape[1] /= 2;
          if (is_cut) shape[0] /= 2;
          if (is_cut) placements.push_back(shard(Axis::kDp, 0));
          sink.on_record(site(kind, name, layout_of(whole, placements)), values(shape, rank));
        };
        const bool is_state = cut.kind == RecordKind::kOptimizer;
        for (const RecordKind kind : {RecordKind::kGrad, cut.kind}) {
          const bool is_cut = kind == cut.kind;
          const std::string state = is_state && is_cut ? ".exp_avg" : "";
          record(kind, "matrix" + state, {8, 6}, is_cut && cut.matrix, {shard(Axis::kTp, 1)});
          record(kind, "norm" + state, {6}, is_cut && cut.norm, {});
          record(kind, "tiny" + state, {2}, is_cut && cut.tiny, {});
          if (cut.kind == RecordKind::kGrad) break;
        }
      },
      Keep::kEverything);
}

void require_shards(const CutAlongDp& cut, const std::vector<std::string>& allowed = {},
                    const JudgePolicy& policy = {}) {
  detail::require_consistent_shards(cut_run(cut), policy, allowed, "run/manifest.json");
}

TEST(ClaimedShards, OfSmallTensorsBesideLargeCopiesAreRefused) {
  for (const RecordKind kind : {RecordKind::kGrad, RecordKind::kParam, RecordKind::kOptimizer}) {
    const CutAlongDp norm{.norm = true, .kind = kind};

    EXPECT_THAT([&] { require_shards(norm); },
                RefusesBy<FileError>(RuleId::kCutBesideCopies, {{"axis", "dp"}}))
        << name_of(kind);
    EXPECT_NO_THROW(require_shards(norm, {"*/norm*"})) << name_of(kind);
  }
}

// As where ZeRO leaves small parameters whole.
TEST(ClaimedShards, OfLargeTensorsBesideSmallCopiesAreTaken) {
  for (const RecordKind kind : {RecordKind::kGrad, RecordKind::kParam, RecordKind::kOptimizer}) {
    EXPECT_NO_THROW(require_shards({.kind = kind}));
    EXPECT_NO_THROW(require_shards({.matrix = true, .kind = kind}));
    EXPECT_NO_THROW(require_shards({.matrix = true, .norm = true, .kind = kind}));
    EXPECT_NO_THROW(require_shards({.matrix = true, .norm = true, .tiny = true, .kind = kind}));
  }
}

TEST(ClaimedShards, ThatNobodyGathersAreRefused) {
  const auto with_calls = [](CollectiveOp op) {
    JudgePolicy policy;
    policy.collectives = [=](int, int, Axis axis) {
      std::vector<ExpectedCall> calls;
      if (axis == Axis::kDp) calls.emplace_back().call.op = op;
      if (axis == Axis::kTp) calls.emplace_back().call.op = CollectiveOp::kAllGather;
      return calls;
    };
    return policy;
  };
  const CutAlongDp all{.matrix = true, .norm = true, .tiny = true};

  EXPECT_THAT([&] { require_shards(all, {}, with_calls(CollectiveOp::kAllReduce)); },
              RefusesBy<FileError>(RuleId::kCutButNeverGathered));
  EXPECT_NO_THROW(require_shards(all, {}, with_calls(CollectiveOp::kReduceScatter)));
  EXPECT_NO_THROW(require_shards({}, {}, with_calls(CollectiveOp::kAllReduce)));
}

}  // namespace
}  // namespace isoshard
