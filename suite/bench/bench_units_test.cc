// SPDX-License-Identifier: Apache-2.0
// Clocks, statistics, pictures, formulas of operations, and the gate.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <span>

#include "core/base/error.h"
#include "fixtures/cases/presets.h"
#include "fixtures/inputs/inputs.h"
#include "harness/report/text/text_report.h"
#include "harness/testing/test_folder.h"
#include "subjects/model/config/builtin.h"
#include "subjects/model/zoo/registry.h"
#include "suite/bench/bench_statistics.h"
#include "suite/bench/bench_text.h"
#include "suite/bench/formulas/flops.h"
#include "suite/bench/gate.h"
#include "suite/bench/paired.h"
#include "suite/bench/timed_parts.h"
#include "suite/clock/collective_times.h"

namespace isoshard {
namespace {

/// Keeps what it was asked to run.
class KeptStages final : public StageRunner {
 public:
  explicit KeptStages(StageWork& kept) : kept_(kept) {}
  [[nodiscard]] const std::vector<ModelSection>& sections() const noexcept override {
    return none_;
  }
  void run(std::size_t /*num_micro_batches*/, const StageWork& work) override { kept_ = work; }
  void run_forward(std::size_t /*num_micro_batches*/, const StageWork& work) override {
    kept_ = work;
  }
  [[nodiscard]] bool has_parameter(std::size_t /*stage*/, std::string_view) const override {
    return false;
  }
  void add_shared(std::map<std::string, at::Tensor, std::less<>>& /*gradients*/) override {}
  [[nodiscard]] std::vector<int> readers_of(std::string_view /*parameter*/) const override {
    return {};
  }
  [[nodiscard]] bool has_loss() const noexcept override { return true; }
  [[nodiscard]] Communicator& group() const noexcept override { std::abort(); }

 private:
  StageWork& kept_;
  std::vector<ModelSection> none_;
};

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(StepClock, PartsAddUpWhateverInterruptsThem) {
  StepClock clock;
  clock.begin_step();
  for (int i = 0; i < 100; ++i) {
    const StepScope forward(clock, StepPart::kForward);
    const StepScope call(clock, StepPart::kCommunication);
    EXPECT_EQ(call.before(), StepPart::kForward);
    clock.add_call(Purpose::kClipNorm, 8, call.before(), 1.0);
  }

  const StepTimes times = clock.end_step();

  const double sum = std::accumulate(times.parts.begin(), times.parts.end(), 0.0);
  EXPECT_GT(times.total, 0);
  EXPECT_NEAR(sum, times.total, 1e-9);
  EXPECT_EQ(times.of(StepPart::kBackward), 0);
  const PurposeTotals calls = clock.purposes()[static_cast<std::size_t>(Purpose::kClipNorm)];
  EXPECT_EQ(calls.calls, 100);
  EXPECT_EQ(calls.bytes, 800);
  EXPECT_EQ(times.communication_in[0], 100);
}

// A pipeline that is timed does the same work at the same place.
TEST(StepClock, LeavesTheDeviceOfAPipelineAndWhatItIsNotAskedFor) {
  StageWork kept;
  StepClock clock;
  TrainerParts parts;
  parts.stages = std::make_unique<KeptStages>(kept);
  time_parts(parts, clock);
  parts.stages->run(
      1, {.forward = [](std::size_t, std::size_t, const at::Tensor& input) { return input; },
          .device = c10::Device(c10::kMeta)});

  EXPECT_EQ(kept.device, c10::Device(c10::kMeta));
  ASSERT_TRUE(kept.forward);
  EXPECT_FALSE(kept.backward);
  const at::Tensor input = at::zeros({1});
  EXPECT_TRUE(kept.forward(0, 0, input).is_same(input));
}

// Forward has begun its work when backward begins; communication may overlap both.
TEST(StepClock, WaitsForTheDeviceWhereItsWorkChanges) {
  StepClock clock;
  int waits = 0;
  clock.set_wait([&] { ++waits; });
  clock.enter(StepPart::kForward);
  EXPECT_EQ(waits, 0) << "outside of a step";

  clock.enter(StepPart::kOther);
  clock.begin_step();
  EXPECT_EQ(waits, 1);
  clock.enter(StepPart::kForward);
  EXPECT_EQ(waits, 2);
  { const StepScope call(clock, StepPart::kCommunication); }
  EXPECT_EQ(waits, 2);
  clock.enter(StepPart::kBackward);
  EXPECT_EQ(waits, 3);
  (void)clock.end_step();
  EXPECT_GE(waits, 4);
}

TEST(StepClock, CountsNothingOutsideOfAStep) {
  StepClock clock;
  clock.enter(StepPart::kForward);
  clock.add_call(Purpose::kClipNorm, 8, StepPart::kForward, 1.0);

  EXPECT_EQ(clock.purposes()[static_cast<std::size_t>(Purpose::kClipNorm)].calls, 0);
}

TEST(StepClock, CallsHiddenWhatPassesWhileATransferIsOnItsWay) {
  StepClock clock;
  const auto compute = [] {
    const auto start = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - start < std::chrono::microseconds(200)) continue;
  };
  clock.begin_step();
  clock.enter(StepPart::kForward);
  compute();
  clock.enter(StepPart::kCommunication, Purpose::kPipeForward);
  clock.set_under_way(true);
  compute();
  clock.enter(StepPart::kBackward);
  compute();
  clock.enter(StepPart::kCommunication, Purpose::kPipeForward);
  clock.set_under_way(false);
  clock.enter(StepPart::kOptimizer);
  compute();

  const StepTimes times = clock.end_step();

  EXPECT_GT(times.hidden, 0);
  EXPECT_EQ(times.hidden, times.of(StepPart::kBackward)) << "neither the calls nor what is outside";
  ASSERT_EQ(clock.spans().size(), 5U + 1) << "the first one is what came before forward";
  EXPECT_EQ(clock.spans()[2].part, StepPart::kCommunication);
  EXPECT_EQ(clock.spans()[2].purpose, Purpose::kPipeForward);
  for (std::size_t i = 1; i < clock.spans().size(); ++i)
    EXPECT_EQ(clock.spans()[i].begin, clock.spans()[i - 1].end);
}

TEST(StepClock, KnowsOfEachPurposeTheMedianCallAndWhatIsHidden) {
  StepClock clock;
  clock.begin_step();
  for (const double seconds : {1.0, 5.0, 2.0})
    clock.add_call(Purpose::kGradReduce, 8, StepPart::kBackward, seconds);
  const std::size_t call = clock.add_call(Purpose::kPipeForward, 4, StepPart::kForward, 0.25);
  clock.add_wait(call, Purpose::kPipeForward, StepPart::kForward, 0.5);
  clock.set_under_way(true, Purpose::kPipeForward);
  clock.enter(StepPart::kForward);

  const StepTimes times = clock.end_step();

  const PurposeTimes purposes = clock.purposes();
  const auto of = [&](Purpose purpose) { return purposes[static_cast<std::size_t>(purpose)]; };
  EXPECT_EQ(of(Purpose::kGradReduce).median, 2);
  EXPECT_EQ(of(Purpose::kGradReduce).hidden, 0);
  EXPECT_EQ(of(Purpose::kPipeForward).median, 0.75) << "a call, and the wait for its result";
  EXPECT_GT(times.hidden, 0);
  EXPECT_EQ(of(Purpose::kPipeForward).hidden, times.hidden);
}

TEST(BenchStatistics, RowsOfCollectivesAreThoseOfTheMeanRankInOneStep) {
  PurposeTimes first{}, second{};
  const auto place = static_cast<std::size_t>(Purpose::kClipNorm);
  first[place] = {.calls = 4, .bytes = 32, .seconds = 2, .hidden = 1, .median = 0.5};
  second[place] = {.calls = 4, .bytes = 32, .seconds = 4, .hidden = 0, .median = 0.75};
  const std::vector<PurposeTimes> ranks = {first, second};

  const std::vector<ReportCollective> rows = purpose_rows(ranks, 2, true),
                                      blind = purpose_rows(ranks, 2, false);

  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].purpose, "clip_norm");
  EXPECT_EQ(rows[0].calls_per_rank, 2);
  EXPECT_EQ(rows[0].bytes, 32) << "of all ranks";
  EXPECT_EQ(rows[0].seconds_per_rank, 1.5);
  EXPECT_EQ(rows[0].median_call_seconds, 0.625);
  EXPECT_EQ(rows[0].hidden_seconds_per_rank, 0.25);
  EXPECT_EQ(blind[0].hidden_seconds_per_rank, std::nullopt) << "not 0, which nobody measured";
}

TEST(GemmCeiling, IsTheMostOfAllRanksTogetherWithOneKindAtOneMoment) {
  ProductRates a{}, b{}, c{};
  a[0] = 5;  // 128, the first layout
  a[2] = 1;  // 256
  b[2] = 7;
  c[0] = 1;
  c[2] = 3;
  const std::vector<ProductRates> first = {a, c}, second = {b, c};
  const std::vector<std::span<const ProductRates>> ranks = {first, second};

  const GemmCeiling ceiling = ceiling_of(ranks, 4);

  EXPECT_EQ(ceiling.flops_per_second, 8) << "of 128 a rank has no rate at that moment";
  EXPECT_EQ(ceiling.size, 256);
  EXPECT_EQ(ceiling.threads, 4);
  EXPECT_EQ(ceiling_of({}, 1).flops_per_second, 0);
}

/// One rank, one step of 1 s; products of this many operations per second.
BenchResult a_result(double ceiling) {
  BenchResult result;
  result.plan.item.subject = "reference";
  result.plan.item.config = builtin_config("tiny");
  result.plan.item.batch_size = 1;
  result.plan.item.seq_length = 16;
  result.plan.warmup_steps = 0;
  BenchRun run;
  run.ranks.resize(1);
  run.ranks[0].steps.resize(1);
  run.ranks[0].steps[0].times.total = 1;
  result.runs = {run};
  result.ceiling = {ceiling, 128, 1};
  return result;
}

TEST(BenchStatistics, TellNoUtilizationAboveOne) {
  const double flops = step_flops(a_result(1).plan.item).model;

  const BenchSummary half = summary_of(a_result(2 * flops)), busy = summary_of(a_result(flops / 2));

  EXPECT_NEAR(half.model_utilization.value(), 0.5, 1e-12);
  EXPECT_FALSE(busy.model_utilization.has_value());
  EXPECT_FALSE(summary_of(a_result(0)).model_utilization.has_value());
  EXPECT_THAT(text_of(result_lines(a_result(flops / 2)), true),
              AllOf(HasSubstr("unknown of the"), HasSubstr("the machine was busy")));
}

TEST(BenchStatistics, QuantilesLieBetweenTheTwoNearest) {
  EXPECT_EQ(quantile({3, 1, 2}, 0.5), 2);
  EXPECT_EQ(quantile({1, 2}, 0.5), 1.5);
  EXPECT_NEAR(quantile({0, 10, 20, 30, 40}, 0.95), 38, 1e-12);
  EXPECT_EQ(quantile({5}, 0.95), 5);
  EXPECT_EQ(deviation_of({5}), 0);
  EXPECT_NEAR(deviation_of({1, 3}), std::sqrt(2), 1e-12);
}

// Student's t with 3 degrees of freedom exceeds 3.1824 in 5 % of all cases.
TEST(PairedRuns, HaveTheIntervalOfTheFormula) {
  const std::vector<double> a = {1, 1, 1, 1},
                            b = {std::exp(0.1), std::exp(0.2), std::exp(0.1), std::exp(0.2)};

  const RatioInterval interval = ratio_of_pairs(a, b, 0.95);

  const double half = 3.182446 * (0.1 / std::sqrt(3)) / 2;
  EXPECT_NEAR(std::log(interval.ratio), 0.15, 1e-12);
  EXPECT_NEAR(std::log(interval.low), 0.15 - half, 1e-5);
  EXPECT_NEAR(std::log(interval.high), 0.15 + half, 1e-5);
  EXPECT_EQ(interval.verdict(), PairedVerdict::kSlower);
  EXPECT_EQ(ratio_of_pairs(b, a, 0.95).verdict(), PairedVerdict::kFaster);
}

TEST(PairedRuns, ThatScatterAreNotToldApart) {
  const std::vector<double> a = {1, 2, 1, 2}, b = {2, 1, 2.1, 1};

  EXPECT_EQ(ratio_of_pairs(a, b, 0.95).verdict(), PairedVerdict::kNotTold);
  EXPECT_EQ(ratio_of_samples(a, b, 0.95).verdict(), PairedVerdict::kNotTold);
}

TEST(PairedRuns, AreNeverOneRun) {
  const std::vector<double> one = {1}, three = {1, 1.01, 0.99};

  EXPECT_THAT([&] { (void)ratio_of_pairs(one, one, 0.95); },
              ThrowsMessage<UsageError>(HasSubstr("at least 3 pairs of runs, got 1")));
  EXPECT_THAT([&] { (void)ratio_of_samples(three, one, 0.95); },
              ThrowsMessage<UsageError>(HasSubstr("at least 3 runs of B, got 1")));
}

TEST(MeshPicture, IsThatOfTheTool) {
  Case item;
  item.subject = "autotp";
  item.degrees = {.dp = 2, .tp = 4};

  EXPECT_EQ(text_of(mesh_lines(item), true), R"(For 8 processes with dp_size=2, tp_size=4:

        TP dimension (tensor parallel)
        ----------------------->
   DP  | rank0 rank1 rank2 rank3 |  <- DP replica 0
   dim | rank4 rank5 rank6 rank7 |  <- DP replica 1
    |
    v

- TP groups (same row): {0,1,2,3}, {4,5,6,7}
  - Model weights are split across these groups; each group processes the same data
- DP groups (same column): {0,4}, {1,5}, {2,6}, {3,7}
  - Gradients are reduced across these groups; each rank of one has other samples
)");
}

/// Operations of matrix products that ATen runs while it lives.
class CountedProducts {
 public:
  CountedProducts() {
    count = 0;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&see).needsInputs(true).scopes(
        {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }
  ~CountedProducts() { at::removeCallback(handle_); }
  inline static double count = 0;

 private:
  static std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& function) {
    const std::string_view name = function.name();
    const std::size_t first = name == "aten::addmm" ? 1 : 0;
    if (name != "aten::mm" && name != "aten::bmm" && name != "aten::addmm") return nullptr;
    const at::Tensor a = function.inputs()[first].toTensor(),
                     b = function.inputs()[first + 1].toTensor();
    count += 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
    return nullptr;
  }
  at::CallbackHandle handle_;
};

TEST(StepFlops, AreThoseThatAtenRuns) {
  for (const char* const name : {"tiny", "tiny-qwen3", "tiny-llama", "tiny-gpt2"}) {
    Case item;
    item.config = builtin_config(name);
    item.batch_size = 3;
    item.seq_length = 10;
    item.data.kind = DataSource::Kind::kRandomIds;
    const auto model = make_model(item.config, AttentionImpl::kEager);
    const auto weights = case_weights(item);
    Parameters parameters;
    for (const ParameterSpec& spec : model->parameters())
      parameters[spec.name] =
          weights->read_as(at::kFloat, spec, Shape(spec.shape.size(), 0), spec.shape)
              .requires_grad_(true);
    const at::Tensor ids = CaseData(item).global_batches(0)[0].input_ids_BS;

    const CountedProducts counted;
    model->forward(ids, parameters, Strategy(), nullptr).sum().backward();

    EXPECT_NEAR(CountedProducts::count / step_flops(item).model, 1, 1e-9) << name;
    EXPECT_EQ(step_flops(item).model, step_flops(item).hardware);
    item.settings.recompute_every = 1;
    EXPECT_GT(step_flops(item).hardware, step_flops(item).model);
  }
}

TEST(BenchTwin, IsSmallAndHasTheSettingsOfTheWhole) {
  Case item;
  item.subject = "autotp";
  item.config = builtin_config("Qwen/Qwen3-32B");
  item.degrees = {.dp = 2, .tp = 4};
  item.dtype = Dtype::kBFloat16;
  item.seq_length = 2048;
  item.settings.zero_stage = 2;

  const Case twin = twin_of(item);

  EXPECT_NO_THROW(twin.validate());
  EXPECT_EQ(twin.degrees, item.degrees);
  EXPECT_EQ(twin.dtype, item.dtype);
  EXPECT_EQ(twin.settings.zero_stage, 2);
  EXPECT_EQ(twin.config.model_type, "qwen3");
  EXPECT_LE(twin.config.hidden_size, 256);
  EXPECT_LT(twin.settings.bucket_bytes, item.settings.bucket_bytes);
  EXPECT_NE(gate_key(twin), gate_key([&] {
              Case other = twin;
              other.settings.zero_stage = 1;
              return other;
            }()));
}

TEST(BenchTwin, FitsEveryDegreeOfEveryBuiltInModel) {
  for (const std::string& name : builtin_names()) {
    if (name.starts_with("lattice")) continue;
    for (const int tp : {1, 2, 4, 8}) {
      Case item;
      item.subject = "megatron";
      item.config = builtin_config(name);
      item.degrees.tp = tp;
      try {
        item.validate();
      } catch (const UsageError&) {
        continue;  // the whole does not fit either
      }
      EXPECT_NO_THROW(twin_of(item).validate()) << name << " tp " << tp;
    }
  }
}

TEST(BenchGate, StopsAFaultAndRemembersOnlyWhatConforms) {
  const TestFolder folder;
  Case item = tiny_fault_case();
  item.subject = "autotp";
  item.degrees = {.dp = 2, .tp = 2};

  const GateResult faulty = pass_gate(item, folder.path() / "gate", "dp_sum_missing");
  const bool is_empty = !std::filesystem::exists(folder.path() / "gate");
  const GateResult right = pass_gate(item, folder.path() / "gate");
  const GateResult again = pass_gate(item, folder.path() / "gate");

  EXPECT_EQ(faulty.state, GateState::kFails);
  EXPECT_EQ(faulty.exit_code, 1);
  EXPECT_THAT(text_of(faulty.report), HasSubstr("DIVERGES"));
  EXPECT_TRUE(is_empty);
  EXPECT_EQ(right.state, GateState::kConforms);
  EXPECT_EQ(again.state, GateState::kRemembered);
  EXPECT_EQ(again.strength, right.strength);
}

}  // namespace
}  // namespace isoshard
