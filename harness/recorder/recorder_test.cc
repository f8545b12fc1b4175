// SPDX-License-Identifier: Apache-2.0
/// Claims about the recorder: what it compares, what it keeps, what it leaves alone.
#include "harness/recorder/recorder.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "harness/stats/tolerance.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::HasSubstr;
using testing::ThrowsMessage;

const MeshShape kTp3({{Axis::kTp, 3}});

Body record_whole(const at::Tensor& whole, RecordKind kind = RecordKind::kActivation) {
  return [=](Sink& sink, int) {
    sink.on_record(site(kind, "x", layout_of(whole.sizes().vec())), whole);
  };
}

Stats merged(const Trace& trace) {
  Stats stats;
  for (const RankTrace& rank : trace.ranks) {
    for (const PartStats& part : rank.records.at(0).parts) merge(stats, part.stats);
  }
  return stats;
}

TEST(Recorder, ComparesAStridedShardWithItsPlaceInTheReference) {
  const at::Tensor whole = values({4, 6}, 1);
  const Reference r = reference(record_whole(whole));
  for (const int dim : {0, 1}) {
    const at::Tensor source = dim == 0 ? values({6, 4}, 1) : whole;
    const Reference ref = reference(record_whole(source));

    const Trace trace = run(kTp3, &ref, [&](Sink& sink, int rank) {
      at::Tensor local = source.narrow(dim, rank * 2, 2).clone();
      if (rank == 2) local[1][1] += 1;
      sink.on_record(site(RecordKind::kActivation, "x",
                          layout_of(source.sizes().vec(), {shard(Axis::kTp, dim)})),
                     local);
    });

    const Stats stats = merged(trace);
    EXPECT_EQ(stats.numel, 24);
    EXPECT_EQ(stats.unequal_values, 1);
    EXPECT_EQ(stats.first_unequal, dim == 0 ? 5 * 4 + 1 : 6 + 5);
    EXPECT_EQ(trace.ranks[0].records[0].parts[0].stats.unequal_values, 0);
    EXPECT_EQ(trace.ranks[2].records[0].parts[0].stats.unequal_values, 1);
  }
}

TEST(Recorder, CallsAreCountedPerStepKindAndName) {
  const Trace trace = run(
      MeshShape(), nullptr,
      [](Sink& sink, int) {
        const at::Tensor x = at::ones({1});
        sink.on_record(site(RecordKind::kParam, "w", layout_of({1})), x);
        sink.on_record(site(RecordKind::kGrad, "w", layout_of({1})), x);
        sink.on_record(site(RecordKind::kParam, "w", layout_of({1})), x);
        sink.begin_step(1);
        sink.on_record(site(RecordKind::kParam, "w", layout_of({1})), x);
      },
      Keep::kEverything);

  const auto& records = trace.ranks[0].records;
  EXPECT_EQ(records[0].key, (RecordKey{0, RecordKind::kParam, "w", 0}));
  EXPECT_EQ(records[1].key, (RecordKey{0, RecordKind::kGrad, "w", 0}));
  EXPECT_EQ(records[2].key, (RecordKey{0, RecordKind::kParam, "w", 1}));
  EXPECT_EQ(records[3].key, (RecordKey{1, RecordKind::kParam, "w", 0}));
  EXPECT_EQ(records[3].order, 3);
}

TEST(Recorder, GradScaleIsDividedOut) {
  const at::Tensor whole = values({8}, 1);
  const Reference r = reference(record_whole(whole));

  const Trace trace = run(MeshShape(), &r, [&](Sink& sink, int) {
    sink.on_record(site(RecordKind::kActivation, "x", layout_of({8}), 4.0), whole * 4);
  });

  EXPECT_EQ(merged(trace).unequal_bits, 0);
}

TEST(Recorder, RecordingLeavesTheGraphAlone) {
  RecordOptions options;
  Recorder recorder(options);
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor y = x * 2;

  const at::Tensor passed =
      recorder.on_activation(site(RecordKind::kActivation, "y", layout_of({2})), y);

  EXPECT_TRUE(passed.is_same(y));
}

TEST(Recorder, ATensorThatIsNotWhatItsLayoutSaysIsRefusedByName) {
  EXPECT_THAT(
      [&] {
        (void)run(kTp3, nullptr, [](Sink& sink, int) {
          sink.on_record(site(RecordKind::kActivation, "x", layout_of({6}, {shard(Axis::kTp, 0)})),
                         at::ones({3}));
        });
      },
      ThrowsMessage<MeshError>(HasSubstr("forward at x (step 0): the local tensor [3]")));
}

/// A reference of ones with a response of 1 % and a run that is off by `error` in every element;
/// whether it is kept.
bool kept_at(double error, RecordKind kind = RecordKind::kActivation) {
  const at::Tensor whole = at::ones({48}, at::kDouble);
  const at::Tensor sign = at::arange(48, at::kDouble).remainder(2).mul(2).sub(1);
  const Reference r = reference(record_whole(whole, kind),
                                [&](int) { return record_whole(whole + 0.01 * sign, kind); });
  const Trace trace = run(kTp3, &r, [&](Sink& sink, int rank) {
    sink.on_record(site(kind, "x", layout_of({48}, {shard(Axis::kTp, 0)})),
                   (whole + error * sign).narrow(0, rank * 16, 16));
  });
  return trace.ranks[0].records[0].kept;
}

TEST(RecorderKeeps, WhatExceedsItsShareOfTheTolerance) {
  EXPECT_FALSE(kept_at(0));
  const double allowed = responses_allowed(3, Dtype::kFloat32) * 0.01;
  EXPECT_FALSE(kept_at(0.5 * allowed)) << "one rank may use up to 1 / sqrt(3) of the whole norm "
                                          "with its third: as much an element as all";
  EXPECT_TRUE(kept_at(1.03 * allowed));
}

TEST(RecorderKeeps, EveryDifferenceOfWhatMustBeExact) {
  EXPECT_FALSE(kept_at(0, RecordKind::kParam));
  EXPECT_TRUE(kept_at(1e-9, RecordKind::kParam));
}

TEST(RecorderKeeps, WhatHasNoReferenceOrIsPartialOrNotFinite) {
  const at::Tensor whole = at::ones({6});
  const Reference r =
      reference(record_whole(whole), [&](int) { return record_whole(whole * 1.5); });
  const auto kept = [&](const Site& where, const at::Tensor& value) {
    return run(MeshShape(), &r, [&](Sink& sink, int) { sink.on_record(where, value); })
        .ranks[0]
        .records[0]
        .kept;
  };
  at::Tensor poisoned = whole.clone();
  poisoned[3] = NAN;

  EXPECT_FALSE(kept(site(RecordKind::kActivation, "x", layout_of({6})), whole));
  EXPECT_TRUE(kept(site(RecordKind::kActivation, "other", layout_of({6})), whole));
  EXPECT_TRUE(
      kept(site(RecordKind::kActivation, "x", layout_of({6}, {partial(Axis::kTp)})), whole));
  EXPECT_TRUE(kept(site(RecordKind::kActivation, "x", layout_of({6})), poisoned));
}

TEST(RecorderMask, ParametersAreJudgedOnlyWhereTheGradientIsAboveItsResponse) {
  const auto body = [](double gradient, double parameter) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kParam, "w", layout_of({3})), at::zeros({3}));
      sink.on_record(site(RecordKind::kGrad, "w", layout_of({3})),
                     at::tensor({1.0, gradient, 2.0}));
      sink.on_record(site(RecordKind::kParam, "w", layout_of({3})),
                     at::tensor({0.5, parameter, 0.5}));
    });
  };
  // The middle gradient is noise of 1e-6: its sign, and with it the step, flips when weights move.
  const Reference r =
      reference(body(1e-6, 0.1), [&](int) { return body(-1e-6, -0.1); }, 3, {.mask = true});

  const Trace trace = run(MeshShape(), &r, body(-1e-6, -0.1), Keep::kWhatDiffers, {.mask = true});

  const Record& after = trace.ranks[0].records[2];
  EXPECT_EQ(after.unmasked, 2);
  EXPECT_EQ(after.parts[0].stats.numel, 2);
  EXPECT_EQ(after.parts[0].stats.unequal_values, 0);
  EXPECT_EQ(r.response({0, RecordKind::kParam, "w", 1})->max_abs, 0)
      << "perturbed runs are masked by their own difference";
  EXPECT_EQ(trace.ranks[0].records[0].unmasked, -1) << "the weight as read is not masked";
}

TEST(CopiesOfRanks, KeepsEqualBytesOfAKeyOnceAndOthersApart) {
  Arena arena(std::size_t{1} << 20, "kept_once");
  ReplicaBytes kept;
  const RecordKey key{0, RecordKind::kGrad, "w", 0}, other{0, RecordKind::kGrad, "v", 0};
  const std::vector<std::byte> a(100, std::byte{1}), b(100, std::byte{2}),
      shorter(50, std::byte{1});

  const std::int64_t first = kept.append(arena, key, a);

  EXPECT_EQ(kept.append(arena, key, a), first);
  EXPECT_NE(kept.append(arena, key, b), first);
  EXPECT_NE(kept.append(arena, key, shorter), first);
  EXPECT_NE(kept.append(arena, other, a), first);
  EXPECT_EQ(kept.append(arena, key, b), kept.append(arena, key, b));
  EXPECT_LT(arena.size(), 5 * 128U) << "four copies, not six";
}

TEST(CopiesOfRanks, ComparesEqualBytesAtOnePlaceOnceAndOthersApart) {
  ReplicaBytes compared;
  const RecordKey key{0, RecordKind::kGrad, "w", 0}, other{0, RecordKind::kGrad, "v", 0};
  PartStats part;
  part.box = {{0, 0}, {2, 0}, {2, 4}};
  part.digest = 7;
  part.stats.max_abs = 0.5;
  compared.add(key, part);

  PartStats moved = part, changed = part, elsewhere_locally = part;
  moved.box.global_offset = {4, 0};
  changed.digest = 8;
  elsewhere_locally.box.local_offset = {6, 0};
  ASSERT_TRUE(compared.find(key, part).has_value());
  EXPECT_EQ(compared.find(key, part)->stats.max_abs, 0.5);
  EXPECT_TRUE(compared.find(key, elsewhere_locally).has_value())
      << "where a rank holds it does not matter";
  EXPECT_FALSE(compared.find(key, moved).has_value());
  EXPECT_FALSE(compared.find(key, changed).has_value());
  EXPECT_FALSE(compared.find(other, part).has_value());
}

}  // namespace
}  // namespace isoshard
