// SPDX-License-Identifier: Apache-2.0
/// Every fault of the catalogue raises an alarm that names the first wrong tensor, the rank and the
/// cause; the same run without the fault is silent, and so is every benign variation.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <utility>

#include "core/base/error.h"
#include "harness/fault/collective_fault.h"
#include "harness/judge/judge.h"
#include "suite/faults/fault.h"
#include "suite/record/expected_calls.h"
#include "suite/reference/reference.h"
#include "suite/testing/every_nth.h"
#include "suite/testing/step_cases.h"
#include "suite/verify/verify_case.h"

namespace isoshard {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

Verdict verdict_of(const Case& item, const RunOptions& options) {
  const Reference& reference = reference_of(item);
  return judge(reference, run_case(item, reference, options), policy_of(item));
}

/// What a rank called counts, too.
Verdict verdict_with_collectives(const Case& item, const RunOptions& options) {
  const Reference& reference = reference_of(item);
  return judge(reference, run_case(item, reference, options),
               with_collectives(policy_of(item), item));
}

std::string first_of(const Verdict& verdict) {
  if (verdict.findings.empty()) return verdict.reason;
  const Finding& first = verdict.findings.front();
  return fmt::format("{}\n{}\n{}", first.what, first.evidence, first.diagnosis);
}

/// What was seen of the faults of one class.
struct ClassScore {
  int faults = 0, alarms = 0, first_right = 0, cause_right = 0;
};

class FaultDetection : public ::testing::TestWithParam<std::string> {
 protected:
  const Fault& fault() const { return find_fault(GetParam()); }

  static void TearDownTestSuite() {
    fmt::print("class  faults  alarm  first tensor  diagnosis\n");
    ClassScore all;
    const auto line = [](const std::string& name, const ClassScore& s) {
      fmt::print("{:<5}  {:>6}  {:>5}  {:>12}  {:>9}\n", name, s.faults, s.alarms, s.first_right,
                 s.cause_right);
    };
    for (const auto& [name, score] : scores()) {
      line(std::string(1, name), score);
      all.faults += score.faults;
      all.alarms += score.alarms;
      all.first_right += score.first_right;
      all.cause_right += score.cause_right;
    }
    line("all", all);
  }

  static std::map<char, ClassScore>& scores() {
    static std::map<char, ClassScore> by_class;
    return by_class;
  }
};

TEST_P(FaultDetection, AlarmsAndNamesTheFirstTensorRankAndCause) {
  ASSERT_TRUE(fault().expected.has_value());
  const ExpectedDetection& expected = *fault().expected;
  const Case item = fault().smallest_case();
  const FaultProbe probe;
  ClassScore& score = scores()[fault().fault_class];
  ++score.faults;

  const Verdict verdict = verdict_with_collectives(item, with_fault({}, fault(), item, probe));

  ASSERT_GT(probe.count(), 0) << "the fault never fired: this test would prove nothing";
  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  ASSERT_FALSE(verdict.findings.empty());
  ++score.alarms;
  const Finding& first = verdict.findings.front();
  ASSERT_FALSE(first.ranks.empty());
  // of several micro-batches the sum after one of them is named, where that is wrong already
  const std::string name = final_of(first.key).name;
  const bool first_right = first.stage == expected.stage &&
                           (expected.name.empty() || name == expected.name) &&
                           first.key.step == expected.step;
  EXPECT_TRUE(first_right) << "expected " << name_of(expected.stage) << " of " << expected.name
                           << " in step " << expected.step << "\n"
                           << first_of(verdict);
  EXPECT_THAT(expected.ranks, Contains(first.ranks.front())) << first_of(verdict);
  score.first_right += static_cast<int>(first_right);
  const std::string wrong_cause = mismatch(expected.cause, first.cause);
  EXPECT_EQ(wrong_cause, "") << first_of(verdict);
  score.cause_right += static_cast<int>(wrong_cause.empty());
  EXPECT_TRUE(first.confirmed || first.stage == Stage::kReplicaDrift)
      << "the controller must have repeated the finding on the kept bytes";
}

void expect_conforms_without(const Fault& fault) {
  const Case item = fault.smallest_case();
  ASSERT_GT(item.world_size(), 1);

  const Verdict verdict = verdict_with_collectives(item, {});

  EXPECT_EQ(verdict.mesh.world_size(), item.world_size());
  EXPECT_EQ(verdict.status, Status::kConforms) << first_of(verdict);
  EXPECT_GT(verdict.compared, 100);
}

class RunsWithoutFaults : public ::testing::TestWithParam<std::string> {};
class RunsWithoutFaultsWide : public ::testing::TestWithParam<std::string> {};
TEST_P(RunsWithoutFaults, Conform) {
  expect_conforms_without(find_fault(GetParam()));
}
TEST_P(RunsWithoutFaultsWide, Conform) {
  expect_conforms_without(find_fault(GetParam()));
}

class BenignVariation : public ::testing::TestWithParam<std::string> {
 protected:
  const Fault& miss() const { return find_fault(GetParam()); }
};

TEST_P(BenignVariation, DoesNotAlarm) {
  const Case item = miss().smallest_case();
  ASSERT_GT(item.world_size(), 1);
  const FaultProbe probe;

  const Verdict verdict = verdict_of(item, with_fault({}, miss(), item, probe));

  EXPECT_GT(probe.count(), 0) << "nothing was changed: this test would prove nothing";
  EXPECT_EQ(verdict.status, Status::kConforms) << "a false alarm: " << first_of(verdict);
  EXPECT_GT(verdict.compared, 100);
}

// The same kind of difference, but larger than legal, is alarmed where it is made.
class BenignVariationControl : public ::testing::TestWithParam<std::string> {};

TEST_P(BenignVariationControl, IsAlarmed) {
  const auto controls = benign_variation_controls();
  const Fault& control = *std::find_if(controls.begin(), controls.end(),
                                       [](const Fault& f) { return f.id == GetParam(); });
  const Case item = control.smallest_case();
  const FaultProbe probe;

  const Verdict verdict = verdict_of(item, with_fault({}, control, item, probe));

  EXPECT_GT(probe.count(), 0);
  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_EQ(verdict.findings.front().stage, control.expected->stage) << first_of(verdict);
}

// In bf16 a fused kernel is within what is allowed, but it is not equal: where equality is
// declared, it alarms.
TEST(BenignVariationControl, FusedRoundingIsAlarmedWhereEqualityIsDeclared) {
  const Fault& miss = find_fault("fused_rounding");
  const Case item = miss.smallest_case();
  const Reference& reference = reference_of(item);
  const FaultProbe probe;
  JudgePolicy options = policy_of(item);
  options.level = Level::kExact;

  const Verdict verdict =
      judge(reference, run_case(item, reference, with_fault({}, miss, item, probe)), options);

  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_EQ(verdict.findings.front().stage, Stage::kForward) << first_of(verdict);
}

/// An all-reduce of gradients as a careless subject may write it: each rank puts its summand into
/// memory that all of them share, at the next free place, and they are added as they lie there. A
/// float sum of three depends on its order, so the result depends on which rank came first.
/// With `in_rank_order` each rank has a place of its own, and there is no race.
class SharedSum final : public CollectiveFault {
 public:
  SharedSum(int num_ranks, bool in_rank_order)
      : num_ranks_(num_ranks), in_rank_order_(in_rank_order) {
    void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw InfrastructureError("no memory for the shared sums");
    shared_ = new (memory) Shared;
  }
  ~SharedSum() override { ::munmap(shared_, sizeof(Shared)); }
  SharedSum(const SharedSum&) = delete;
  SharedSum& operator=(const SharedSum&) = delete;

  bool applies(const InterceptedCall& call) const override {
    return call.op == CollectiveOp::kAllReduce && call.info.purpose == Purpose::kGradReduce &&
           call.info.axis == Axis::kDp && call.comm->size() == num_ranks_ &&
           call.output.dtype == Dtype::kFloat32 && call.output.count <= kMostElements;
  }
  Work apply(const InterceptedCall& call) const override {
    const auto count = static_cast<std::size_t>(call.output.count);
    auto* const own = reinterpret_cast<float*>(call.output.data);
    const int place =
        in_rank_order_ ? call.comm->rank() : static_cast<int>(shared_->arrived++) % num_ranks_;
    std::copy_n(own, count, shared_->places[static_cast<std::size_t>(place)].data());
    call.comm->barrier({Purpose::kSetup, Axis::kDp, {}});
    for (std::size_t i = 0; i < count; ++i) {
      float sum = 0;
      for (int p = 0; p < num_ranks_; ++p) sum += shared_->places[static_cast<std::size_t>(p)][i];
      own[i] = call.reduction == Reduction::kAvg ? sum / static_cast<float>(num_ranks_) : sum;
    }
    call.comm->barrier({Purpose::kSetup, Axis::kDp, {}});
    return {};
  }

 private:
  static constexpr std::int64_t kMostElements = 1 << 20;
  struct Shared {
    std::atomic<std::uint32_t> arrived{0};
    std::array<std::array<float, kMostElements>, 3> places;
  };
  int num_ranks_;
  bool in_rank_order_;
  Shared* shared_;
};

/// Buckets small enough that a step has many reductions.
Case race_case() {
  Case item = step_case("ddp", {.dp = 3});
  item.settings.bucket_bytes = 4096;
  EXPECT_EQ(item.world_size(), 3);
  return item;
}

RunOptions on_shared_sums(bool in_rank_order, const FaultProbe& probe) {
  RunOptions options;
  options.decorate = [sum = std::make_shared<SharedSum>(3, in_rank_order), probe](
                         std::unique_ptr<Communicator> comm, int) {
    return decorate_with_fault(std::move(comm), sum, probe);
  };
  return options;
}

Verdict verdict_on_shared_sums(const Case& item, bool in_rank_order, ReferenceKind reference,
                               int repeat, const FaultProbe& probe) {
  return CaseJudge({.reference = reference,
                    .repeat = repeat,
                    .makes_own_calls = true,
                    .run = on_shared_sums(in_rank_order, probe)})
      .judge_case(item)
      .verdict;
}

// Within tolerances every order of a sum is right: only runs that are compared with each other show
// that no two of them agree. Whoever comes first is decided by the delays and the machine.
TEST(RaceDetection, ASumInTheOrderOfArrivalIsNotRepeatable) {
  const Case item = race_case();
  const FaultProbe once, often;
  const Verdict alone = verdict_on_shared_sums(item, false, ReferenceKind::kPlain, 1, once);

  const Verdict verdict = verdict_on_shared_sums(item, false, ReferenceKind::kPlain, 6, often);

  EXPECT_GT(once.count(), 3 * 5) << "a step must have many reductions";
  EXPECT_EQ(alone.status, Status::kConforms) << "one run of a race is within tolerances";
  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_THAT(verdict.reason, HasSubstr("not repeatable: run "));
  EXPECT_THAT(verdict.reason, HasSubstr("differs from run 1"));
  ASSERT_FALSE(verdict.findings.empty());
  EXPECT_EQ(verdict.findings.front().stage, Stage::kParameterGrad) << first_of(verdict);
  EXPECT_FALSE(verdict.findings.front().ranks.empty());
}

// Subjects side by side share their reference, not their runs: the one that scatters its sums has
// no race, the one that reduces them has.
TEST(RaceDetection, OfOneSubjectAmongSeveralIsNotRepeatable) {
  const Case race = race_case();
  Case right = race;
  right.subject = "fsdp_tp";
  ASSERT_EQ(right.reference_slug(), race.reference_slug());
  const FaultProbe probe;
  CaseJudge judge({.reference = ReferenceKind::kPlain,
                   .tables = true,
                   .repeat = 6,
                   .makes_own_calls = true,
                   .run = on_shared_sums(false, probe)});
  judge.announce({right, race, right});

  const Verdict before = judge.judge_case(right).verdict, verdict = judge.judge_case(race).verdict,
                after = judge.judge_case(right).verdict;

  EXPECT_GT(probe.count(), 3 * 5);
  ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  EXPECT_THAT(verdict.reason, HasSubstr("not repeatable: run "));
  for (const Verdict& other : {before, after}) {
    EXPECT_EQ(other.status, Status::kConforms) << first_of(other);
    EXPECT_EQ(other.runs, 6);
  }
}

TEST(RaceDetection, TheSameSumInRankOrderConformsInEveryRun) {
  const FaultProbe probe;

  const Verdict verdict =
      verdict_on_shared_sums(race_case(), true, ReferenceKind::kPlain, 6, probe);

  EXPECT_GT(probe.count(), 6 * 3 * 5) << "in each of the runs";
  EXPECT_EQ(verdict.status, Status::kConforms) << first_of(verdict);
  EXPECT_EQ(verdict.runs, 6);
}

std::vector<std::string> ids_of(std::span<const Fault> faults) {
  std::vector<std::string> ids;
  for (const Fault& fault : faults) ids.push_back(fault.id);
  return ids;
}

INSTANTIATE_TEST_SUITE_P(Catalogue, FaultDetection, ::testing::ValuesIn(ids_of(fault_catalogue())),
                         [](const auto& test) { return test.param; });
INSTANTIATE_TEST_SUITE_P(Catalogue, RunsWithoutFaults,
                         ::testing::ValuesIn(every_nth(4, ids_of(fault_catalogue()))),
                         [](const auto& test) { return test.param; });
INSTANTIATE_TEST_SUITE_P(Catalogue, RunsWithoutFaultsWide,
                         ::testing::ValuesIn(all_but_every_nth(4, ids_of(fault_catalogue()))),
                         [](const auto& test) { return test.param; });
INSTANTIATE_TEST_SUITE_P(Catalogue, BenignVariation,
                         ::testing::ValuesIn(ids_of(benign_variations())),
                         [](const auto& test) { return test.param; });
INSTANTIATE_TEST_SUITE_P(Catalogue, BenignVariationControl,
                         ::testing::ValuesIn(ids_of(benign_variation_controls())),
                         [](const auto& test) { return test.param; });

TEST(FaultCatalogue, UnknownNamesAreRefusedWithASuggestion) {
  try {
    (void)find_fault("dp_sum_mising");
    FAIL() << "an unknown fault was accepted";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("did you mean 'dp_sum_missing'"));
  }
}

TEST(FaultCatalogue, EveryFaultHasAHookACaseAndAnExpectation) {
  ASSERT_GE(fault_catalogue().size(), 65U);
  for (const Fault& fault : fault_catalogue()) {
    EXPECT_GE(fault.hooks.count(), 1) << fault.id;
    EXPECT_FALSE(fault.subjects.empty()) << fault.id;
    EXPECT_FALSE(fault.source.empty()) << fault.id;
    EXPECT_FALSE(title_of_class(fault.fault_class).empty()) << fault.id;
    ASSERT_TRUE(fault.expected.has_value()) << fault.id;
    const ExpectedCause& cause = fault.expected->cause;
    EXPECT_TRUE(cause.id != CauseId::kNone || !cause.values.empty()) << fault.id;
    EXPECT_NO_THROW(fault.smallest_case().validate()) << fault.id;
  }
}

TEST(FaultCatalogue, EveryBenignVariationHasAHookAndExpectsNothing) {
  ASSERT_GE(benign_variations().size(), 25U);
  for (const Fault& miss : benign_variations()) {
    EXPECT_GE(miss.hooks.count(), 1) << miss.id;
    EXPECT_FALSE(miss.expected.has_value()) << miss.id;
    EXPECT_NO_THROW(miss.smallest_case().validate()) << miss.id;
    const auto controls = benign_variation_controls();
    EXPECT_TRUE(std::any_of(controls.begin(), controls.end(),
                            [&](const Fault& control) { return miss.id.starts_with(control.id); }))
        << miss.id << " has no control: nothing shows how much too much is";
  }
}

}  // namespace
}  // namespace isoshard
