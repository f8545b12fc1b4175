// SPDX-License-Identifier: Apache-2.0
// Claims about plans: what is reported of runs of a subject that is not ours.
#include "harness/verify/verify_runs.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "harness/judge/compare_bundles.h"
#include "harness/report/formats/report_formats.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::ThrowsMessage;

/// The sum of a vector of six ones, cut over tp, and its gradient.
class Total final : public Subject {
 public:
  Total(Rank& rank, Sink& sink) : tp_(rank.comm()), sink_(sink) {}
  void setup() override {}
  void forward_backward(std::span<const Batch>) override {
    at::Tensor sum = at::full({1}, 6.0 / tp_.size(), at::kFloat);
    all_reduce(tp_, sum, Reduction::kSum, {Purpose::kRowParallelForward, Axis::kTp, {}}).wait();
    (void)sink_.on_activation({RecordKind::kActivation, "total", replicated({1}), 1.0}, sum);
    sink_.on_record({RecordKind::kScalar, "loss", replicated({1}), 1.0}, sum);
  }
  void reduce_gradients() override {
    Layout layout = replicated({6});
    layout.placements = {shard(Axis::kTp, 0)};
    sink_.on_record({RecordKind::kGrad, "x", layout, 1.0}, at::ones({6 / tp_.size()}));
  }
  void clip() override {}
  void step() override {}
  void state() override {}

 private:
  Communicator& tp_;
  Sink& sink_;
};

RunSpec total(int tp) {
  RunSpec spec;
  spec.name = "total_tp" + std::to_string(tp);
  spec.mesh = MeshShape({{Axis::kTp, tp}});
  spec.make = [](Rank& rank, Sink& sink) { return std::make_unique<Total>(rank, sink); };
  spec.batches = [](int, int) { return std::vector<Batch>(1); };
  spec.policy.level = Level::kExact;
  spec.policy.may_be_unused = {Axis::kTp};  // each part is a one
  return spec;
}

RunPlan plan_of(int tp) {
  return {.reference = total(1), .runs = {total(tp)}};
}

TEST(VerifyRuns, ReportsEachRunWithTablesAndAnExitCode) {
  RunPlan plan = plan_of(2);
  plan.runs.push_back(total(3));
  plan.tables = true;

  const Report report = verify_runs(plan);

  EXPECT_EQ(report.exit_code, kExitConforms) << text_of(report);
  ASSERT_THAT(report.cases, SizeIs(2));
  EXPECT_EQ(report.cases[1].name, "total_tp3");
  EXPECT_EQ(report.cases[1].verdict->mesh.world_size(), 3);
  EXPECT_EQ(report.summary, "2 of 2 runs conform (exact)");
  ASSERT_THAT(report.tables, SizeIs(1));
  ASSERT_THAT(report.tables[0].columns, SizeIs(3));
  EXPECT_EQ(report.tables[0].columns[2].output_norms.at("total"), 6);
  EXPECT_EQ(report.tables[0].columns[0].losses, std::vector<double>{6});
}

TEST(VerifyRuns, AFaultIsFoundWhereverItIsPut) {
  RunPlan lost = plan_of(2), changed = plan_of(2);
  lost.fault = {.name = "lost_sum",
                .collective = skip_calls(Purpose::kRowParallelForward, Axis::kTp)};
  changed.fault = {.name = "changed", .tap = [](int) -> TapMutation {
                     return [](const Site&, const at::Tensor& value) { return value + 1; };
                   }};

  for (const RunPlan& plan : {lost, changed}) {
    const Report report = verify_runs(plan);

    EXPECT_EQ(report.exit_code, kExitDiverges) << text_of(report);
    EXPECT_EQ(report.cases.at(0).fault, plan.fault->name);
    EXPECT_THAT(report.cases.at(0).verdict->reason, HasSubstr("forward at total"));
  }
}

TEST(VerifyRuns, AFaultWithoutEffectMakesTheRunIncomplete) {
  RunPlan plan = plan_of(2);
  plan.fault = {.name = "elsewhere", .collective = skip_calls(Purpose::kGradReduce, Axis::kDp)};

  const Report report = verify_runs(plan);

  EXPECT_EQ(report.exit_code, kExitInfrastructure);
  EXPECT_THAT(report.cases.at(0).failure, HasSubstr("elsewhere had no effect on total_tp2"));
}

TEST(VerifyRuns, ARunThatBreaksDownLeavesTheOthers) {
  RunPlan plan = plan_of(2);
  plan.runs.insert(plan.runs.begin(), total(3));
  plan.runs.front().batches = [](int, int) -> std::vector<Batch> { throw UsageError("no batch"); };

  const Report report = verify_runs(plan);

  EXPECT_EQ(report.exit_code, kExitInfrastructure);
  EXPECT_THAT(report.cases.at(0).failure, HasSubstr("no batch"));
  EXPECT_EQ(report.cases.at(1).status(), Status::kConforms);
}

TEST(VerifyRuns, DumpedRunsAreJudgedAlike) {
  const TestFolder folder;
  RunPlan plan = plan_of(2);
  plan.dump = folder.path();

  const Report report = verify_runs(plan);

  const Verdict again =
      compare_bundles(folder.path() / "reference_total_tp1", folder.path() / "total_tp2", {});
  EXPECT_EQ(report.exit_code, kExitConforms);
  EXPECT_TRUE(again.findings.empty()) << again.reason;
  EXPECT_EQ(again.rule.id, RuleId::kAxisWithoutWitness) << "a bundle's policy excuses no axis";
  EXPECT_EQ(again.compared, report.cases.at(0).verdict->compared);
}

TEST(VerifyRuns, RefusesAPlanThatJudgesNothing) {
  EXPECT_THAT([] { (void)verify_runs({.reference = total(1)}); },
              ThrowsMessage<UsageError>(HasSubstr("at least 1 run, got 0")));
  EXPECT_THAT(
      [] {
        (void)verify_runs({.reference = total(1), .runs = {total(2), total(2)}});
      },
      ThrowsMessage<UsageError>(HasSubstr("got total_tp2 twice")));
}

/// As Total, with an output that only a world of one writes. Its memory held the right values: of
/// the reference's tensor, or of one that this rank has freed.
class Forgetful final : public Subject {
 public:
  Forgetful(Rank& rank, Sink& sink, std::int64_t size)
      : is_whole_(rank.size() == 1), size_(size), sink_(sink) {}
  void setup() override {}
  void forward_backward(std::span<const Batch>) override {
    { const at::Tensor right = at::full({size_}, 6.0F); }
    at::Tensor output = at::empty({size_});
    if (is_whole_) output.fill_(6.0F);
    sink_.on_record({RecordKind::kGrad, "x", replicated({size_}), 1.0}, output);
  }
  void reduce_gradients() override {}
  void clip() override {}
  void step() override {}
  void state() override {}

 private:
  bool is_whole_;
  std::int64_t size_;
  Sink& sink_;
};

TEST(VerifyRuns, ARunThatIsRightByMemoryThatItHasNotWrittenDiverges) {
  for (const std::int64_t size : {20, 20'000, 3'000'000}) {
    RunPlan plan = plan_of(2);
    for (RunSpec* spec : {&plan.reference, &plan.runs.front()}) {
      spec->make = [size](Rank& rank, Sink& sink) {
        return std::make_unique<Forgetful>(rank, sink, size);
      };
    }

    const Report report = verify_runs(plan);

    EXPECT_EQ(report.exit_code, kExitDiverges) << size << '\n' << text_of(report);
    EXPECT_EQ(report.cases.at(0).verdict->mesh.world_size(), 2);
  }
}

/// Adds up summands of all ranks in shared memory, in the order in which ranks come, or with
/// `in_rank_order` in theirs. 1e8, 1 and -1e8 have another sum in fp32 in almost every order.
class Racing final : public Subject {
 public:
  struct Shared {
    std::atomic<int> arrived{0};
    std::array<float, 3> places{};
  };
  Racing(Rank& rank, Sink& sink, Shared& shared, bool in_rank_order)
      : tp_(rank.comm()), sink_(sink), shared_(shared), in_rank_order_(in_rank_order) {}
  void setup() override {}
  void forward_backward(std::span<const Batch>) override {
    constexpr std::array<float, 3> kSummands{1e8F, 1, -1e8F};
    float sums = 0;  // of the calls, each with a digit of its own
    for (int call = 0; call < 8; ++call) {
      float sum = 0;
      tp_.barrier({Purpose::kColumnParallelBackward, Axis::kTp, {}});
      if (tp_.size() == 3) {
        const int place = in_rank_order_ ? tp_.rank() : shared_.arrived++ % 3;
        shared_.places[static_cast<std::size_t>(place)] =
            kSummands[static_cast<std::size_t>(tp_.rank())];
        tp_.barrier({Purpose::kSetup, Axis::kTp, {}});
        for (const float summand : shared_.places) sum += summand;
        tp_.barrier({Purpose::kSetup, Axis::kTp, {}});
      } else {
        for (const float summand : kSummands) sum += summand;
      }
      sums = 2 * sums + sum;
    }
    sink_.on_record({RecordKind::kScalar, "loss", replicated({1}), 1.0},
                    at::full({1}, 1000 + sums / 1000));
  }
  void reduce_gradients() override {
    sink_.on_record({RecordKind::kGrad, "x", replicated({6}), 1.0}, at::ones({6}));
  }
  void clip() override {}
  void step() override {}
  void state() override {}

 private:
  Communicator& tp_;
  Sink& sink_;
  Shared& shared_;
  bool in_rank_order_;
};

/// Two runs of three ranks beside one reference: one without a race, and one that may have it.
/// Every sum is within the tolerance.
Report report_of_races(bool has_race, int repeat) {
  void* const memory = ::mmap(nullptr, sizeof(Racing::Shared), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw InfrastructureError("no memory for the shared sums");
  auto* const shared = new (memory) Racing::Shared;
  const auto racing = [shared](int tp, bool in_rank_order, std::string name) {
    RunSpec spec = total(tp);
    spec.name = std::move(name);
    spec.make = [=](Rank& rank, Sink& sink) {
      return std::make_unique<Racing>(rank, sink, *shared, in_rank_order);
    };
    spec.policy = {.rtol = 0.5, .may_be_unused = {Axis::kTp}};
    return spec;
  };
  const Report report =
      verify_runs({.reference = racing(1, true, "alone"),
                   .runs = {racing(3, true, "in_order"), racing(3, !has_race, "as_they_come")},
                   .repeat = repeat});
  ::munmap(memory, sizeof(Racing::Shared));
  return report;
}

TEST(VerifyRuns, ASubjectWithARaceBesideOthersIsNotRepeatable) {
  const Report once = report_of_races(true, 1), often = report_of_races(true, 8);

  EXPECT_EQ(once.exit_code, kExitConforms) << text_of(once) << "one run of it is within tolerance";
  EXPECT_EQ(often.exit_code, kExitDiverges) << text_of(often);
  ASSERT_THAT(often.cases, SizeIs(2));
  const Verdict& right = *often.cases[0].verdict;
  const Verdict& race = *often.cases[1].verdict;
  EXPECT_EQ(right.status, Status::kConforms) << right.reason;
  EXPECT_EQ(right.runs, 8);
  EXPECT_EQ(race.mesh.world_size(), 3);
  ASSERT_EQ(race.status, Status::kDiverges) << race.reason;
  EXPECT_THAT(race.reason, HasSubstr("not repeatable: run "));
  EXPECT_EQ(race.findings.at(0).key.name, "loss");
  EXPECT_LE(race.runs, 8);
}

TEST(VerifyRuns, RunsInRankOrderConformHoweverOftenTheyAreMade) {
  const Report report = report_of_races(false, 8);

  EXPECT_EQ(report.exit_code, kExitConforms) << text_of(report);
  EXPECT_EQ(report.cases.at(1).verdict->runs, 8);
}

}  // namespace
}  // namespace isoshard
