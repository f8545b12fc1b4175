// SPDX-License-Identifier: Apache-2.0
/// Claims about pooled statistics, in both directions: roundings pass, and a factor or a shift that
/// hides in the roundings of each tensor does not.
#include "harness/verdict/pooled.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "harness/judge/judge.h"
#include "harness/stats/tolerance.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::HasSubstr;
using testing::StartsWith;

constexpr int kLayers = 4;
constexpr int kRuns = 16;
constexpr double kNoise = 0.01;
const MeshShape kDp1Tp2({{Axis::kDp, 1}, {Axis::kTp, 2}});

/// What is done to the gradient of that name, as a factor and a shift.
struct Change {
  std::string name;  ///< a part of the names; empty: all
  double factor = 1, shift = 0;
  int rank = -1;  ///< only there; -1: everywhere
  double loss = 1;
};

/// A step in bf16 with a gradient for each of three weights a layer; every element is off by noise
/// of its own, drawn by `seed`; 0: by none.
Body step(int seed, const Change& change = {}, bool is_whole = true, double noise = kNoise) {
  return [=](Sink& sink, int rank) {
    sink.on_record(
        site(RecordKind::kScalar, "loss", layout_of({1})),
        at::full({1}, 5.5, at::kDouble) * change.loss *
            (seed == 0 ? 1 : 1 + 1e-5 * (values({1}, 7919 + seed).item<double>() + 0.001)));
    for (int layer = 0; layer < kLayers; ++layer) {
      int number = 0;
      for (const char* const weight : {"up.weight", "down.weight", "norm.weight"}) {
        const int id = layer * 3 + number++;
        at::Tensor x = values({64, 32}, 10 + id, at::kDouble);
        if (seed != 0) x = x * (1 + noise * values({64, 32}, 1000 * seed + id, at::kDouble));
        const std::string name = fmt::format("layers.{}.{}", layer, weight);
        if (name.find(change.name) != std::string::npos && (change.rank < 0 || change.rank == rank))
          x = x * change.factor + change.shift;
        x = x.to(at::kBFloat16);
        if (!is_whole) x = x.narrow(0, 32 * rank, 32).contiguous();
        sink.on_record(site(RecordKind::kGrad, name, layout_of({64, 32}, {shard(Axis::kTp, 0)})),
                       x);
      }
    }
  };
}

JudgePolicy policy() {
  JudgePolicy p;
  p.coarsest = Dtype::kBFloat16;
  return p;
}

/// Runs with moved weights are three times as far away as the redrawn ones.
Reference with_redrawn(int runs = kRuns, const Change& change = {}) {
  Reference result = reference(
      step(0), [](int i) { return step(500 + i, {}, true, 3 * kNoise); }, 3, policy());
  for (int i = 0; i < runs; ++i)
    result.add_redrawn(run(MeshShape(), &result, step(1 + i, change), Keep::kNothing, policy(),
                           RunPurpose::kResponse));
  return result;
}

Verdict verdict_on(const Reference& reference, const Change& change) {
  const Trace trace =
      run(kDp1Tp2, &reference, step(99, change, false), Keep::kWhatDiffers, policy());
  EXPECT_EQ(trace.ranks.size(), 2U);
  return judge(reference, trace, policy());
}

TEST(Pooled, ARunWithRoundingsOfItsOwnConforms) {
  const Reference reference = with_redrawn();

  const Verdict verdict = verdict_on(reference, {});

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  // all, layers, classes, ranks, gradients, loss
  EXPECT_EQ(verdict.pools.size(), 1U + kLayers + 3U + 2U + 3 * kLayers + 1U);
  for (const PooledComparison& p : verdict.pools) {
    EXPECT_TRUE(p.within) << p.name;
    EXPECT_EQ(p.runs, kRuns) << p.name;
    EXPECT_GT(p.allowed_scale.most, 1) << p.name;
    EXPECT_LT(p.allowed_scale.least, 1) << p.name;
  }
}

TEST(Pooled, AFactorThatEachTensorHidesIsNamedWhereItIs) {
  const Reference reference = with_redrawn();
  const struct {
    Change change;
    const char* name;
  } rows[] = {
      {{.name = "", .factor = 1.002}, "all gradients (step 0): scale 1.00"},
      {{.name = "", .factor = 0.998}, "all gradients (step 0): scale 0.99"},
      {{.name = "layers.2.", .factor = 1.004}, "gradients of layers.2 (step 0): scale 1.00"},
      {{.name = "down", .factor = 1.004}, "gradients of all down.weight (step 0): scale 1.00"},
      {{.name = "layers.1.norm", .factor = 1.006}, "gradient of layers.1.norm.weight (step 0): "},
      {{.name = "", .factor = 1.005, .rank = 1}, "gradients on rank 1 (step 0): scale 1.00"},
      {{.name = "", .shift = 0.001}, "all gradients (step 0): shift"},
      {{.name = "", .loss = 1.0005}, "loss (step 0): scale 1.00"},
  };
  for (const auto& [change, name] : rows) {
    const Verdict verdict = verdict_on(reference, change);

    ASSERT_EQ(verdict.status, Status::kDiverges) << name;
    EXPECT_THAT(verdict.findings.front().what, StartsWith(name));
    const Cause& cause = verdict.findings.front().cause;
    if (change.loss == 1) {
      EXPECT_THAT(cause, IsNoCause()) << name;
    } else {
      EXPECT_THAT(cause, IsCause(CauseId::kNumberOff, {{"scale", change.loss}})) << name;
    }
    for (const TensorComparison& t : verdict.tensors) EXPECT_TRUE(t.within) << name;
  }
}

TEST(Pooled, WhatTheReferencesOwnRoundingsDoToAllRedrawnRunsIsNoWidth) {
  const Reference reference = with_redrawn(kRuns, {.name = "", .factor = 1.003});

  for (const double factor : {1.0, 1.0015, 1.003})
    EXPECT_EQ(verdict_on(reference, {.name = "", .factor = factor}).status, Status::kConforms)
        << factor;
  for (const double factor : {0.998, 1.005})
    EXPECT_EQ(verdict_on(reference, {.name = "", .factor = factor}).status, Status::kDiverges)
        << factor;
}

// The norm of gradients in bf16 is a bf16 number. Where all redrawn runs round to the same one, the
// number above it is a legal neighbor. A loss, which is summed in fp64, has no such neighbors.
TEST(PooledNumbers, OfSixteenBitsMayBeTheNextOne) {
  constexpr double kUlp = 1.0 / 32;  // of bf16 from 4 to 8
  const auto norm = [](double number) -> Body {
    return [number](Sink& sink, int) {
      sink.on_record(site(RecordKind::kScalar, "grad_norm", layout_of({1})),
                     at::full({1}, number, at::kDouble));
    };
  };
  // One more run of the reference gives `other`.
  const auto status = [&](double reference_number, double other, double judged_number) {
    Reference reference = synthetic::reference(
        norm(reference_number),
        [&](int i) { return norm(reference_number + (i % 2 == 0 ? kUlp : -kUlp)); }, 3, policy());
    for (int i = 0; i < kRuns; ++i)
      reference.add_redrawn(run(MeshShape(), &reference, norm(i == 3 ? other : reference_number),
                                Keep::kNothing, policy(), RunPurpose::kResponse));
    return judge(reference,
                 run(MeshShape(), &reference, norm(judged_number), Keep::kWhatDiffers, policy()),
                 policy())
        .status;
  };

  EXPECT_EQ(status(5.5, 5.5, 5.5 + kUlp), Status::kConforms);
  EXPECT_EQ(status(5.5, 5.5, 5.5 - kUlp), Status::kConforms);
  EXPECT_EQ(status(5.5, 5.5, 5.5 + 4 * kUlp), Status::kDiverges);
  EXPECT_EQ(status(5.501, 5.501, 5.501 + kUlp), Status::kDiverges) << "the reference has more bits";
  EXPECT_EQ(status(5.5, 5.5001, 5.5 + kUlp), Status::kDiverges) << "a redrawn run has more bits";
}

// Redrawn runs may turn the rounding of no subnormal number; a correct run may turn that of one.
TEST(Pooled, ASubnormalNumberMayBeTheNextOne) {
  constexpr int kNumel = 16;
  const double quantum = least_positive(Dtype::kBFloat16);
  // `up` elements are the next number, from element `first` on.
  const auto numbers = [&](int up, int first) -> Body {
    return [=](Sink& sink, int) {
      at::Tensor value = at::arange(1, 1 + kNumel, at::kDouble);
      value.slice(0, first, first + up) += 1;
      sink.on_record(site(RecordKind::kGrad, "w", layout_of({kNumel})),
                     (value * quantum).to(at::kFloat).to(at::kBFloat16));
    };
  };
  Reference reference = synthetic::reference(
      numbers(0, 0), [&](int i) { return numbers(kNumel / 2, 4 * i % kNumel); }, 3, policy());
  for (int i = 0; i < kRuns; ++i)
    reference.add_redrawn(run(MeshShape(), &reference, numbers(0, 0), Keep::kNothing, policy(),
                              RunPurpose::kResponse));
  const auto status = [&](int up) {
    return judge(reference,
                 run(MeshShape(), &reference, numbers(up, 0), Keep::kWhatDiffers, policy()),
                 policy())
        .status;
  };

  EXPECT_NE(status(1), Status::kDiverges);
  EXPECT_EQ(status(kNumel), Status::kDiverges);
}

TEST(Pooled, WithoutRedrawnRunsNothingIsPooledAndTheVerdictSaysSo) {
  const Reference reference = with_redrawn(0);

  const Verdict verdict = verdict_on(reference, {.name = "", .factor = 1.002});

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_TRUE(verdict.pools.empty());
  EXPECT_THAT(verdict.would_miss, HasSubstr("runs with moved weights set the limits"));
}

TEST(Pooled, WhatWouldBeMissedIsWhatPasses) {
  const Reference reference = with_redrawn();
  const Verdict clean = verdict_on(reference, {});
  double allowed = 0;
  for (const PooledComparison& p : clean.pools) {
    if (p.pool == PoolOf::kAll) allowed = p.least_found();
  }
  ASSERT_GT(allowed, 0);

  EXPECT_EQ(verdict_on(reference, {.name = "", .factor = 1 + 0.5 * allowed}).status,
            Status::kConforms);
  EXPECT_EQ(verdict_on(reference, {.name = "", .factor = 1 + 2 * allowed}).status,
            Status::kDiverges);
  EXPECT_THAT(
      clean.would_miss,
      StartsWith(fmt::format("scale errors below {:.2g} % in all gradients, ", 100 * allowed)));
  EXPECT_THAT(clean.would_miss, HasSubstr("in the loss"));
}

TEST(Pooled, AtLevelExactAnythingIsRejected) {
  JudgePolicy exact = policy();
  exact.level = Level::kExact;
  const Reference reference = with_redrawn();

  const Verdict verdict = judge(
      reference, run(kDp1Tp2, &reference, step(0, {}, false), Keep::kWhatDiffers, exact), exact);

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_TRUE(verdict.pools.empty());
  EXPECT_THAT(verdict.would_miss, StartsWith("nothing"));
}

/// Two steps of one gradient; in step `at` one element is off by `element`, and all by `shift`.
Body two_steps(int seed, double noise, int at = 0, double element = 0, double shift = 0) {
  return [=](Sink& sink, int) {
    for (const int number : {0, 1}) {
      sink.begin_step(number);
      at::Tensor x = values({256, 256}, 10 + number, at::kDouble);
      const at::Tensor smallest = x.abs().argmin();
      if (seed != 0) x = x * (1 + noise * values({256, 256}, 1000 * seed + number, at::kDouble));
      if (number == at) {
        x = x + shift;
        x.view({-1}).index_add_(0, smallest.view({1}), at::full({1}, element, at::kDouble));
      }
      sink.on_record(site(RecordKind::kGrad, "weight", layout_of({256, 256})), x.to(at::kBFloat16));
    }
  };
}

// The mean moves alike by one element and by all. An Adam step turns the sign of one element, and
// nothing shifts all of them.
TEST(PooledAfterAStep, AShiftIsMoreThanAFewElementsMake) {
  const auto judged = [](int step, double element, double shift, bool is_adam = true) {
    JudgePolicy p = policy();
    p.mask = is_adam;
    Reference reference = synthetic::reference(
        two_steps(0, 0), [](int i) { return two_steps(500 + i, 6 * kNoise); }, 3, p);
    for (int i = 0; i < kRuns; ++i)
      reference.add_redrawn(run(MeshShape(), &reference, two_steps(1 + i, kNoise), Keep::kNothing,
                                p, RunPurpose::kResponse));
    const Trace trace = run(MeshShape(), &reference, two_steps(99, kNoise, step, element, shift),
                            Keep::kWhatDiffers, p);
    return judge(reference, trace, p);
  };
  const double of_all = 12.0 / (256 * 256);

  EXPECT_EQ(judged(1, 12, 0).status, Status::kConforms) << judged(1, 12, 0).reason;
  const auto is_shifted =
      testing::Field(&Verdict::findings, testing::Contains(FindingIs(FindingId::kPoolShift)));
  EXPECT_THAT(judged(1, 0, of_all), is_shifted);
  EXPECT_THAT(judged(0, 0, of_all), is_shifted);
  EXPECT_THAT(judged(0, 12, 0), is_shifted) << "no step was taken yet";
  EXPECT_THAT(judged(1, 12, 0, false), is_shifted) << "SGD turns no sign";
}

TEST(PooledFindings, ABroaderPoolIsNamedOnlyIfItHasTheTensorThatIsFarthestOff) {
  const auto off = [](PoolOf pool, const char* name, const char* first, double scale) {
    PooledComparison p;
    p.pool = pool;
    p.name = name;
    p.first = {0, RecordKind::kActivationGrad, first, 0};
    p.tensors = pool == PoolOf::kTensor ? 1 : 2;
    p.scale = scale;
    p.allowed_scale = {0.999, 1.001};
    p.allowed_shift = {-1, 1};
    p.within = false;
    return p;
  };
  const auto core = off(PoolOf::kTensor, "core of layer 1", "layers.1.core", 1.0037);
  const auto named = [&](const PooledComparison& broad) {
    return pooled_findings({broad, core}, Reference()).front().key.name;
  };

  EXPECT_EQ(named(off(PoolOf::kClass, "all k_proj", "layers.0.k_proj", 1.0036)), "layers.1.core");
  EXPECT_EQ(named(off(PoolOf::kLayer, "layers.0", "layers.0.core", 1.0036)), "layers.1.core");
  EXPECT_EQ(named(off(PoolOf::kClass, "all core", "layers.0.core", 1.0036)), "layers.0.core");
  EXPECT_EQ(named(off(PoolOf::kLayer, "layers.1", "layers.1.mlp", 1.0036)), "layers.1.mlp");
  EXPECT_EQ(named(off(PoolOf::kAll, "all", "norm", 1.0036)), "norm");
  EXPECT_EQ(named(off(PoolOf::kAll, "all", "norm", 1.002)), "layers.1.core") << "less far off";
}

}  // namespace
}  // namespace isoshard
