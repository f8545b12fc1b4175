// SPDX-License-Identifier: Apache-2.0
/// An injection changes what it selects as it says, and nothing else.
#include "suite/faults/injection.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/comm/thread/thread_world.h"
#include "harness/judge/judge.h"
#include "subjects/optim/optimizer.h"
#include "subjects/train/trainer.h"
#include "suite/faults/catalogue.h"
#include "suite/reference/policy.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

using Values = std::vector<float>;

const std::vector<Segment> kCarried = {
    {"model.layers.0.mlp.up_proj.weight", ParamClass::kMatrix, 0, 2},
    {"model.layers.1.input_layernorm.weight", ParamClass::kNorm, 2, 2},
    {"model.norm.weight", ParamClass::kNorm, 4, 2}};

Buffer buffer_of(Values& values) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()),
          Dtype::kFloat32};
}

Case two_ranks() {
  Case item = fault_case("llama", "ddp", {.dp = 2});
  item.micro_batches = 4;
  return item;
}

/// Lets two ranks of dp do `act` with a communicator that has the injection.
template <class Act>
void on_two_ranks(const Injection& injection, const FaultProbe& probe, Act act) {
  const Case item = two_ranks();
  ThreadWorld world(2);
  world.run([&](Communicator& comm) {
    EXPECT_EQ(comm.size(), 2);
    const RunOptions options = inject({}, injection, item, probe);
    std::unique_ptr<Communicator> own = comm.split(0, comm.rank());
    if (options.decorate) own = options.decorate(std::move(own), comm.rank());
    act(*own);
  });
}

struct Sums {
  std::array<Values, 2> by_rank;
  bool fired = false;
};

/// Rank r gives r + 1 for each of six elements.
Sums sums_with(const Injection& injection) {
  Sums sums;
  const FaultProbe probe;
  on_two_ranks(injection, probe, [&](Communicator& comm) {
    Values values(6, static_cast<float>(comm.rank() + 1));
    comm.all_reduce(buffer_of(values), Reduction::kSum, {Purpose::kGradReduce, Axis::kDp, kCarried})
        .wait();
    sums.by_rank.at(static_cast<std::size_t>(comm.rank())) = values;
  });
  sums.fired = probe.count() > 0;
  return sums;
}

Injection skip() {
  return skipped(Purpose::kGradReduce, Axis::kDp);
}

Injection times_micro_batches() {
  return scaled(Purpose::kGradReduce, Axis::kDp, FaultFactor::kMicroBatches);
}

template <class Edit>
Injection edited(Injection injection, Edit edit) {
  edit(injection);
  return injection;
}

TEST(Injection, SkipKeepsTheOwnSummandOfWhatIsSelected) {
  struct Row {
    Injection injection;
    Values of_rank_1;
  };
  const Row rows[] = {
      {skip(), {2, 2, 2, 2, 2, 2}},
      {skipped(Purpose::kGradReduce, Axis::kDp, {ParamClass::kNorm}), {3, 3, 2, 2, 2, 2}},
      {edited(skip(), [](Injection& i) { i.name = "model.norm.weight"; }), {3, 3, 3, 3, 2, 2}},
      {edited(skip(), [](Injection& i) { i.name = "*.mlp.*"; }), {2, 2, 3, 3, 3, 3}},
      {edited(skip(), [](Injection& i) { i.name = "*norm*"; }), {3, 3, 2, 2, 2, 2}},
      {edited(skip(), [](Injection& i) { i.layers = FaultLayers::kLast; }), {3, 3, 2, 2, 3, 3}},
      {edited(skip(), [](Injection& i) { i.layers = FaultLayers::kInside; }), {2, 2, 2, 2, 3, 3}},
      {edited(skip(), [](Injection& i) { i.layers = FaultLayers::kOutside; }), {3, 3, 3, 3, 2, 2}},
      {edited(skip(),
              [](Injection& i) {
                i.name = "*";
                i.extent = FaultExtent::kElement;
                i.position = 1;
              }),
       {3, 2, 3, 2, 3, 2}}};
  for (const Row& row : rows) {
    const Sums sums = sums_with(row.injection);
    EXPECT_EQ(sums.by_rank[1], row.of_rank_1) << in_words(row.injection);
    EXPECT_TRUE(sums.fired) << in_words(row.injection);
  }
}

TEST(Injection, WithoutAPlaceIsIdle) {
  for (const Injection& injection :
       {skipped(Purpose::kClipNorm, Axis::kDp), skipped(Purpose::kGradReduce, Axis::kTp),
        skipped(Purpose::kGradReduce, Axis::kDp, {ParamClass::kTied}),
        edited(skip(), [](Injection& i) { i.name = "model.norm"; }),
        edited(skip(), [](Injection& i) { i.least_micro_batches = 5; }),
        scaled(Purpose::kGradReduce, Axis::kDp, FaultFactor::kTp)}) {
    const Sums sums = sums_with(injection);
    EXPECT_EQ(sums.by_rank[1], Values(6, 3)) << in_words(injection);
    EXPECT_FALSE(sums.fired) << in_words(injection);
  }
}

// What a rank gives reaches all; what comes out is changed on the rank itself.
TEST(Injection, ChangesWhatARankGivesOrGets) {
  EXPECT_EQ(sums_with(times_micro_batches()).by_rank[0], Values(6, 12));
  for (const bool are_others : {false, true}) {
    Injection gets = times_micro_batches();
    gets.ranks = FaultRanks{Axis::kDp, 0, are_others};
    Injection gives = gets;
    gives.side = FaultSide::kGiven;

    const Sums got = sums_with(gets), given = sums_with(gives);

    EXPECT_EQ(got.by_rank[0], Values(6, are_others ? 3 : 12));
    EXPECT_EQ(got.by_rank[1], Values(6, are_others ? 12 : 3));
    EXPECT_EQ(given.by_rank[0], Values(6, are_others ? 9 : 6));
    EXPECT_EQ(given.by_rank[1], given.by_rank[0]);
  }
}

TEST(Injection, ChangesACopyOfWhatIsSent) {
  Injection injection{.point = FaultPoint::kCollective,
                      .name = "*micro-batch 2",
                      .called = {CollectiveOp::kSendRecv, Purpose::kPipeForward, Axis::kPp},
                      .side = FaultSide::kGiven,
                      .change = FaultChange::kZero,
                      .extent = FaultExtent::kHalf,
                      .position = 1};
  for (const char* name : {"stage 0, micro-batch 2", "stage 0, micro-batch 3"}) {
    const bool is_chosen = std::string(name).ends_with("2");
    const FaultProbe probe;
    on_two_ranks(injection, probe, [&](Communicator& comm) {
      Values own{1, 2, 3, 4, 5}, got(5);
      const std::vector<Segment> carried = {{name, ParamClass::kOther, 0, 5}};
      const CallInfo info{Purpose::kPipeForward, Axis::kPp, carried};
      const bool sends = comm.rank() == 0;
      const Transfer transfers[] = {{sends, 1 - comm.rank(), buffer_of(sends ? own : got), info}};
      comm.send_recv(transfers).wait();
      EXPECT_EQ(own, Values({1, 2, 3, 4, 5}));
      const Values sent = is_chosen ? Values({1, 2, 0, 0, 0}) : own;
      EXPECT_EQ(got, sends ? Values(5) : sent);
    });
    EXPECT_EQ(probe.count() > 0, is_chosen);
  }
}

at::Tensor changed_to(const std::vector<double>& values, const Injection& injection) {
  return changed(at::tensor(values, at::kDouble), injection);
}

TEST(Injection, ChangesItsExtent) {
  const at::Tensor halved = changed_to(
      {1, 2, 3, 4, 5}, {.change = FaultChange::kZero, .extent = FaultExtent::kHalf, .position = 1});
  const at::Tensor keys =
      changed_to({1, 2, 3, 4, 5, 6}, {.extent = FaultExtent::kSecondThird, .magnitude = -2});
  const at::Tensor zeros =
      changed_to({0, 2, 0.0, -4},
                 {.change = FaultChange::kShift, .extent = FaultExtent::kZeros, .magnitude = 2});
  const at::Tensor signs =
      changed_to({0, 2, -0.0, -4}, {.extent = FaultExtent::kZeros, .magnitude = -2});
  const at::Tensor bits = changed_to({1.7, -0.3}, {.change = FaultChange::kRound, .magnitude = 1});

  const at::Tensor noise = changed_to({3, 3, 3}, {.change = FaultChange::kNoise, .magnitude = 0.1});

  EXPECT_TRUE(at::equal(halved, at::tensor({1., 2., 0., 0., 0.}, at::kDouble))) << halved;
  EXPECT_TRUE(at::equal(keys, at::tensor({1., 2., -3., -4., 5., 6.}, at::kDouble))) << keys;
  const double size = std::sqrt(5);
  EXPECT_TRUE(at::allclose(zeros, at::tensor({2 * size, 2., 2 * size, -4.}, at::kDouble))) << zeros;
  EXPECT_TRUE(at::equal(signs.signbit(), at::tensor({1, 0, 0, 1}).to(at::kBool))) << signs;
  EXPECT_LE((noise - 3).abs().max().item<double>(), 0.3);
  EXPECT_GT((noise - 3).std().item<double>(), 0.03) << noise;
  EXPECT_TRUE(at::equal(bits, at::tensor({1.5, -0.25}, at::kDouble))) << bits;
}

// old + (new - old) is not new in floating point, so elements outside must not be computed again.
TEST(Injection, OfAnUpdateLeavesElementsOutsideOfItsExtentAlone) {
  const FaultProbe probe;
  const RunOptions options = inject({},
                                    {.point = FaultPoint::kUpdate,
                                     .name = "weight",
                                     .change = FaultChange::kZero,
                                     .extent = FaultExtent::kElement},
                                    two_ranks(), probe);
  ThreadWorld world(1);
  world.run([&](Communicator& comm) {
    Mesh mesh({}, comm);
    TrainerParts parts;
    parts.optimizer = make_optimizer({.kind = OptimizerSettings::Kind::kSgd, .learning_rate = 0.1});
    options.edits.parts(parts, mesh);
    at::manual_seed(1);
    const at::Tensor old = at::randn({999}), gradient = at::randn({999});
    NamedTensors parameters{{"weight", old.clone()}}, right{{"weight", old.clone()}};
    parts.optimizer->step(parameters, {{"weight", gradient}});
    make_optimizer({.kind = OptimizerSettings::Kind::kSgd, .learning_rate = 0.1})
        ->step(right, {{"weight", gradient}});
    const at::Tensor is_wrong = parameters.at("weight").ne(right.at("weight"));
    EXPECT_TRUE(is_wrong[0].item<bool>());
    EXPECT_EQ(is_wrong.sum().item<int>(), 1);
    EXPECT_EQ(probe.count(), 1);
  });
}

TEST(Injection, OfNaNToNaNChangesNothing) {
  const FaultProbe probe;
  on_two_ranks({.point = FaultPoint::kCollective,
                .called = {CollectiveOp::kAllReduce, Purpose::kGradReduce, Axis::kDp},
                .magnitude = 1},
               probe, [&](Communicator& comm) {
                 Values values(6, std::numeric_limits<float>::quiet_NaN());
                 comm.all_reduce(buffer_of(values), Reduction::kSum,
                                 {Purpose::kGradReduce, Axis::kDp, kCarried})
                     .wait();
               });
  EXPECT_EQ(probe.count(), 0);
}

TEST(Injection, WithAnOpLeavesOtherOpsAlone) {
  for (const char* const name : {"", "*"}) {
    const Sums sums =
        sums_with({.point = FaultPoint::kCollective,
                   .name = name,
                   .called = {CollectiveOp::kReduceScatter, Purpose::kGradReduce, Axis::kDp},
                   .magnitude = 1});
    EXPECT_EQ(sums.by_rank[1], Values(6, 3)) << name;
    EXPECT_FALSE(sums.fired) << name;
  }
}

TEST(Injection, TakesItsFactorFromTheCase) {
  Case item = fault_case("llama", "nd", {.cp = 5, .tp = 3});
  item.micro_batches = 7;
  const auto factor_of = [&](FaultFactor factor) {
    return 1 + with_numbers_of(item, {.factor = factor, .magnitude = 9}).magnitude;
  };
  EXPECT_EQ(factor_of(FaultFactor::kMagnitude), 10);
  EXPECT_EQ(factor_of(FaultFactor::kTp), 3);
  EXPECT_EQ(factor_of(FaultFactor::kCp), 5);
  EXPECT_EQ(factor_of(FaultFactor::kMicroBatches), 7);
  EXPECT_DOUBLE_EQ(factor_of(FaultFactor::kOneOverTp), 1.0 / 3);
  EXPECT_DOUBLE_EQ(factor_of(FaultFactor::kOneOverMicroBatches), 1.0 / 7);
}

TEST(Injection, OfAChangeThatItsPointDoesNotHaveIsRefused) {
  const auto put = [](const Injection& injection) {
    return inject({}, injection, two_ranks(), FaultProbe());
  };
  EXPECT_THROW((void)put({.point = FaultPoint::kForward, .change = FaultChange::kSkip}),
               UsageError);
  EXPECT_THROW((void)put({.point = FaultPoint::kPositions}), UsageError);
  EXPECT_THROW((void)put(edited(skip(),
                                [](Injection& i) {
                                  i.ranks = FaultRanks{Axis::kDp, 0};
                                })),
               UsageError);
  EXPECT_THROW((void)put({.point = FaultPoint::kCollective,
                          .called = {CollectiveOp::kAllGather, Purpose::kParamGather, Axis::kDp},
                          .side = FaultSide::kGiven}),
               UsageError);
  EXPECT_THROW((void)put({.point = FaultPoint::kLoss, .change = FaultChange::kZero}), UsageError);
  EXPECT_THROW((void)put(edited(skip(), [](Injection& i) { i.side = FaultSide::kGiven; })),
               UsageError);
}

TEST(Injection, OfASettingThatHasNoSuchValueIsRefused) {
  const auto put = [](const char* setting, const char* value) {
    return inject({},
                  {.point = FaultPoint::kSetting,
                   .name = setting,
                   .change = FaultChange::kSet,
                   .value = value},
                  two_ranks(), FaultProbe());
  };
  EXPECT_NO_THROW((void)put("bucket_bytes", "1"));
  EXPECT_THROW((void)put("bucket_byte", "1"), UsageError);
  for (const auto& [setting, value] : {std::pair("bucket_bytes", "many"),
                                       {"bucket_bytes", "12x"},
                                       {"bucket_bytes", ""},
                                       {"recompute_every", "99999999999"},
                                       {"autocast", "fp12"},
                                       {"reduction_order", "any"}})
    EXPECT_THROW((void)put(setting, value), UsageError) << setting << " " << value;
}

// At each other point: what is selected is changed, and what is not there is idle.
class InjectionOfARun : public ::testing::TestWithParam<Injection> {};

Verdict verdict_of(const Injection& injection, const FaultProbe& probe) {
  Case item = fault_case("llama", "ddp", {.dp = 2});
  item.settings.autocast = Dtype::kBFloat16;
  const Reference& reference = reference_of(item);
  return judge(reference, run_case(item, reference, inject({}, injection, item, probe)),
               policy_of(item));
}

TEST_P(InjectionOfARun, FiresAndIsAlarmedOrIsIdle) {
  const FaultProbe probe, idle_probe;
  Injection nowhere = GetParam();
  nowhere.ranks = FaultRanks{Axis::kDp, 2};

  const Verdict verdict = verdict_of(GetParam(), probe), idle = verdict_of(nowhere, idle_probe);

  ASSERT_EQ(verdict.mesh.world_size(), 2);
  EXPECT_NO_THROW(require_fired(probe, "this injection", "the run"));
  EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_THROW(require_fired(idle_probe, "this injection", "the run"), IdleFaultError);
  EXPECT_EQ(idle.status, Status::kConforms) << idle.reason;
}

INSTANTIATE_TEST_SUITE_P(
    Points, InjectionOfARun,
    ::testing::Values(
        Injection{.point = FaultPoint::kForward, .name = "*.layers.1.mlp", .magnitude = 1},
        Injection{.point = FaultPoint::kBackward, .name = "*.layers.1.mlp", .magnitude = 1},
        Injection{.point = FaultPoint::kUpdate,
                  .layers = FaultLayers::kLast,
                  .change = FaultChange::kZero},
        Injection{.point = FaultPoint::kLoss, .magnitude = 1},
        Injection{.point = FaultPoint::kSetting,
                  .name = "autocast",
                  .change = FaultChange::kSet,
                  .value = "none",
                  .ranks = FaultRanks{Axis::kDp, 1}}),
    [](const auto& tested) { return std::string(name_of(tested.param.point)); });

}  // namespace
}  // namespace isoshard
