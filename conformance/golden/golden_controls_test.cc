// SPDX-License-Identifier: Apache-2.0
// The suites of goldens can fail: faults are regressions, also
// on machines that round differently; test runs write nothing.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "harness/fault/probe.h"
#include "harness/judge/judge.h"
#include "harness/testing/test_folder.h"
#include "harness/verdict/verdict.h"
#include "suite/faults/fault.h"
#include "suite/goldens/golden_run.h"
#include "suite/goldens/step_lines.h"
#include "suite/record/run_case.h"
#include "suite/reference/reference.h"
#include "suite/train/judge_training.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kNow = "2026-02-03T04:05:06Z";

/// A golden of the list, made shorter.
GoldenSpec short_spec(const std::string& name, int steps = 6) {
  GoldenSpec spec = select_goldens({name}).at(0);
  spec.item.steps = steps;
  return spec;
}

RunOptions faulty(const std::string& fault, const Case& item, const FaultProbe& probe) {
  return with_fault({}, find_fault(fault), item, probe);
}

class GoldenControls : public ::testing::Test {
 protected:
  GoldenControls() { ::unsetenv("CI"); }

  /// Recorded here and now and accepted, as if on a machine that rounds differently if asked.
  void accept(const GoldenSpec& spec, bool elsewhere = false) {
    Golden golden = GoldenRecorder().record(spec);
    EXPECT_TRUE(golden.parity.holds) << golden.parity.text;
    golden.build = {std::string(40, 'c'), "clean", ""};
    if (elsewhere) golden.arithmetic = "00000000000000ee";
    GoldenStore(folder_.path()).accept(golden, "a test", kNow);
  }
  [[nodiscard]] GoldenCheck check(const GoldenSpec& spec, const RunOptions& run = {}) const {
    return check_golden(GoldenStore(folder_.path()), spec, run);
  }
  TestFolder folder_;
};

TEST_F(GoldenControls, ARunIsItsOwnGoldenAndAFaultIsNot) {
  for (const char* name : {"curve_autotp_tp2_dp2_fp32_sgd", "step_qwen2_tp2_dp2_bf16",
                           "lattice_autotp_tp2_dp2_bf16"}) {
    const GoldenSpec spec = short_spec(name, name[0] == 'c' ? 6 : 1);
    for (const bool elsewhere : {false, true}) {
      accept(spec, elsewhere);

      EXPECT_EQ(check(spec).comparison.answer, GoldenAnswer::kMatch) << name << elsewhere;
      const FaultProbe probe;
      const GoldenCheck broken = check(spec, faulty("dp_sum_missing", spec.item, probe));
      EXPECT_GT(probe.count(), 0);
      EXPECT_EQ(broken.comparison.answer, GoldenAnswer::kRegression) << name << elsewhere;
      EXPECT_THAT(broken.text,
                  AllOf(HasSubstr("REGRESSION"), HasSubstr("look further: isoshard verify")));
    }
  }
}

TEST_F(GoldenControls, RoundingsOfAnotherMachineAreDrift) {
  // Weights one ulp off, by a seed that no perturbed run of the bound has: runs that differ by
  // roundings only.
  const GoldenSpec spec = short_spec("curve_reference_dp2_bf16_sgd", 20);
  accept(spec, true);
  const Golden golden = GoldenStore(folder_.path()).read(spec.name);
  TrainOptions options;
  options.perturbed_by = 77;
  const Curve curve = train_case(spec.item, options).curve;
  Golden actual = run_golden(spec);
  ASSERT_EQ(actual.lines.size(), curve.steps.size());
  for (std::size_t i = 0; i < curve.steps.size(); ++i) {
    actual.lines[i].numbers.front().value = curve.steps[i].loss;
    for (GoldenNumber& number : actual.lines[i].numbers) {
      if (number.name == "grad_norm") number.value = curve.steps[i].grad_norm;
    }
  }

  EXPECT_EQ(name_of(compare_golden(golden, actual).answer), "drift");
  actual.arithmetic = golden.arithmetic;
  EXPECT_EQ(name_of(compare_golden(golden, actual).answer), "regression")
      << "where machines round alike";
}

// What a curve may drift is what the judge of curves allows; what a tensor may drift is what the
// judge of steps allows.
TEST_F(GoldenControls, DriftIsWhatTheJudgeAllows) {
  const GoldenSpec curve = short_spec("curve_ddp_dp2_bf16_sgd", 8),
                   step = short_spec("step_qwen2_tp2_dp2", 1);
  const std::vector<CurveSpread> spreads = train_reference(curve.item).curve.spreads;
  const Golden of_curve = GoldenRecorder().record(curve);
  ASSERT_EQ(of_curve.lines.size(), spreads.size());
  CurveSpread envelope;
  for (std::size_t i = 0; i < spreads.size(); ++i) {
    envelope.loss = std::max(envelope.loss, spreads[i].loss);
    envelope.grad_norm = std::max(envelope.grad_norm, spreads[i].grad_norm);
    for (const GoldenNumber& number : of_curve.lines[i].numbers) {
      const double floor = 1e-6 * std::fabs(number.value);
      const std::map<std::string, double> allowed = {
          {"loss", std::max(floor, 3 * envelope.loss)},
          {"grad_norm", std::max(floor, 3 * envelope.grad_norm)},
          {"learning_rate", 0.0}};
      if (allowed.contains(number.name)) {
        EXPECT_EQ(number.drift, allowed.at(number.name)) << number.name << " of step " << i;
      }
    }
  }
  EXPECT_GT(envelope.loss, spreads.front().loss) << "the floor alone would show less";

  ReferenceOptions options;
  options.responses = 3;
  const Reference reference = make_reference(step.item, options);
  Verdict verdict = judge(reference, run_case(step.item, reference, {}), policy_of(step.item));
  // what follows from the rest is not stored
  std::erase_if(verdict.tensors, [](const TensorComparison& tensor) {
    return tensor.stage == Stage::kClippedGrad || tensor.stage == Stage::kProgress ||
           tensor.key.name == "loss_backward";
  });
  const Golden of_step = GoldenRecorder().record(step);
  ASSERT_EQ(of_step.lines.size(), verdict.tensors.size());
  int with_norm = 0;
  for (std::size_t i = 0; i < verdict.tensors.size(); ++i) {
    const TensorComparison& tensor = verdict.tensors[i];
    for (const GoldenNumber& norm : of_step.lines[i].numbers) {
      EXPECT_EQ(norm.drift, tensor.insensitive ? tensor.allowed_absolute
                                               : tensor.allowed_relative_error * norm.value)
          << of_step.lines[i].name;
      ++with_norm;
    }
  }
  EXPECT_GT(with_norm, 0);
}

/// What may be wrong with a tensor and leave its norm as it is, or nearly so.
using Corruption = void (*)(std::vector<double>& elements, std::size_t row);
const std::map<std::string, Corruption> kCorruptions = {
    {"negated",
     [](std::vector<double>& v, std::size_t) {
       for (double& element : v) element = -element;
     }},
    {"rolled by one element",
     [](std::vector<double>& v, std::size_t) { std::rotate(v.begin(), v.begin() + 1, v.end()); }},
    {"reversed", [](std::vector<double>& v, std::size_t) { std::reverse(v.begin(), v.end()); }},
    {"two rows swapped",
     [](std::vector<double>& v, std::size_t row) {
       if (v.size() >= 2 * row)
         std::swap_ranges(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(row),
                          v.end() - static_cast<std::ptrdiff_t>(row));
     }},
    {"one row negated", [](std::vector<double>& v, std::size_t row) {
       std::for_each(v.end() - static_cast<std::ptrdiff_t>(row), v.end(),
                     [](double& element) { element = -element; });
     }}};

struct Counted {
  int wrong = 0;        ///< tensors that the corruption changes
  int seen = 0;         ///< of them, those that projections find
  int certain = 0;      ///< of them, those with an error of at least 20 times what is allowed
  double expected = 0;  ///< how many are found on average over all choices of signs
  double variance = 0;  ///< of that number
};

/// How likely it is that the projections of an error of this norm are further off than `allowed`:
/// each of the eight sums has about a normal distribution with the variance norm^2, so the squared
/// distance is norm^2 times a chi-square with eight degrees of freedom.
double chance_to_see(double norm, double allowed) {
  const double half = allowed * allowed / (norm * norm) / 2;
  return std::exp(-half) * (1 + half * (1 + half / 2 * (1 + half / 3)));
}

/// A recorded step and what a golden would store of it.
struct RecordedStep {
  Trace trace;
  Verdict verdict;
};

RecordedStep recorded(const GoldenSpec& spec) {
  ReferenceOptions options;
  options.responses = 3;
  const Reference reference = make_reference(spec.item, options);
  RecordedStep step{run_case(spec.item, reference, {.keep = Keep::kEverything}), {}};
  step.verdict = judge(reference, step.trace, policy_of(spec.item));
  return step;
}

/// Corrupts each tensor that may drift, one after the other, on rank 0 or on all ranks.
std::map<std::string, Counted> corrupted(const RecordedStep& step, bool all_ranks) {
  std::map<std::string, Counted> counts;
  for (const TensorComparison& tensor : step.verdict.tensors) {
    if (is_equal_everywhere(tensor) || tensor.elements < 2) continue;
    const std::vector<RankElements> right = elements_of(step.trace, tensor.key);
    const double allowed = allowed_distance(tensor, right);
    const auto golden = stored(project(tensor.key, right), kProjectedFactor * allowed);
    if (!golden.has_value()) continue;
    const Shape& shape = step.trace.ranks[0].find(tensor.key)->local_shape;
    for (const auto& [name, corrupt] : kCorruptions) {
      std::vector<RankElements> wrong = right;
      double error = 0;
      for (std::size_t r = 0; r < (all_ranks ? wrong.size() : 1); ++r) {
        std::vector<double>& elements = wrong[r].elements;
        const std::size_t row = shape.size() < 2 ? 1 : static_cast<std::size_t>(shape.back());
        corrupt(elements, std::min(elements.size(), row));
        for (std::size_t i = 0; i < elements.size(); ++i) {
          const double apart = elements[i] - right[r].elements[i];
          error += apart * apart;
        }
      }
      if (error == 0) continue;
      const bool seen =
          !(distance_of(golden->values, project(tensor.key, wrong)) <= golden->allowed);
      const bool certain = std::sqrt(error) >= 20 * allowed;
      Counted& count = counts[name];
      ++count.wrong;
      count.seen += seen ? 1 : 0;
      count.certain += certain ? 1 : 0;
      const double chance = chance_to_see(std::sqrt(error), golden->allowed);
      count.expected += chance;
      count.variance += chance * (1 - chance);
      EXPECT_TRUE(seen || !certain) << name << " is overlooked in " << describe(tensor.key);
    }
  }
  return counts;
}

// None of them moves a norm, so that without projections each would be a drift.
TEST_F(GoldenControls, AWrongTensorOnAForeignMachineIsSeenByItsProjections) {
  for (const bool is_bf16 : {false, true}) {
    const GoldenSpec spec =
        short_spec(is_bf16 ? "step_qwen2_tp2_dp2_bf16" : "step_qwen2_tp2_dp2", 1);
    const RecordedStep step = recorded(spec);
    for (const bool all_ranks : {true, false}) {
      for (const auto& [name, count] : corrupted(step, all_ranks)) {
        const std::string words =
            fmt::format("{}, {}, on {}: {} of {} are seen, {} for certain, {:.1f} expected",
                        spec.name, name, all_ranks ? "all ranks" : "rank 0", count.seen,
                        count.wrong, count.certain, count.expected);
        fmt::print("{}\n", words);
        // Signs of different tensors are independent: 4 standard deviations are missed once in
        // 30,000 choices of signs. Errors of few elements are no normal numbers, but the sums of
        // their signs have the same mean square.
        EXPECT_GE(count.seen, count.expected - 4 * std::sqrt(count.variance)) << words;
        EXPECT_GT(count.wrong, 100) << words;
      }
    }
  }
}

// Through the whole run: the last gradient at a tap, so that nothing before it differs.
TEST_F(GoldenControls, APermutedOrNegatedTensorOfTheRunIsARegressionElsewhere) {
  const GoldenSpec spec = short_spec("step_qwen2_tp2_dp2", 1);
  accept(spec, true);
  using Edit = at::Tensor (*)(const at::Tensor&);
  const auto check_with = [&](Edit edit, int only_rank) {
    RunOptions broken;
    broken.mutation = [=](int rank) -> TapMutation {
      return [=](const Site& site, at::Tensor value) {
        const bool is_it = site.kind == RecordKind::kActivationGrad &&
                           site.name == "model.embed_tokens" &&
                           (only_rank < 0 || rank == only_rank);
        return is_it ? edit(value) : value;
      };
    };
    return check(spec, broken);
  };
  const auto is_first = HasSubstr("first gradient at model.embed_tokens (step 0): ");

  for (const Edit edit : {Edit([](const at::Tensor& t) { return -t; }),
                          Edit([](const at::Tensor& t) { return t.flip({1}); }),
                          Edit([](const at::Tensor& t) { return t.roll(1, 2); })}) {
    const GoldenCheck wrong = check_with(edit, -1);

    EXPECT_EQ(wrong.comparison.answer, GoldenAnswer::kRegression) << wrong.text;
    EXPECT_THAT(wrong.text, AllOf(is_first, HasSubstr("projections")));
  }
  // An ulp on one of two copies: no tolerance sees it, and copies are equal on every machine.
  const GoldenCheck apart = check_with([](const at::Tensor& t) { return t * (1 + 0x1p-22); }, 3);
  EXPECT_EQ(apart.comparison.answer, GoldenAnswer::kRegression) << apart.text;
  EXPECT_THAT(apart.text, AllOf(is_first, HasSubstr("copies: ranks 2 and 3")));
}

TEST_F(GoldenControls, AFaultIsRecordedButNotAccepted) {
  for (const char* name :
       {"curve_autotp_tp2_dp2_fp32_sgd", "step_qwen2_tp2_dp2", "lattice_autotp_tp2_dp2_bf16"}) {
    const GoldenSpec spec = short_spec(name, name[0] == 'c' ? 6 : 1);
    const FaultProbe probe;
    Golden golden = GoldenRecorder(faulty("dp_sum_missing", spec.item, probe)).record(spec);
    golden.build = {std::string(40, 'c'), "clean", ""};

    EXPECT_GT(probe.count(), 0);
    EXPECT_FALSE(golden.parity.holds) << name << ": " << golden.parity.text;
    EXPECT_THROW(GoldenStore(folder_.path()).accept(golden, "a test", kNow), GoldenError) << name;
  }
}

TEST_F(GoldenControls, ABrokenReferenceDoesNotMatchDdpAndIsNotAccepted) {
  const GoldenSpec spec = short_spec("curve_reference_dp2_fp32_sgd");
  RunOptions broken;
  broken.mutation = [](int) -> TapMutation {
    return [](const Site& site, at::Tensor value) {
      return site.kind == RecordKind::kActivation && site.name == "model.layers.1.mlp"
                 ? value * 1.01
                 : value;
    };
  };

  const Golden golden = GoldenRecorder(broken).record(spec);

  EXPECT_FALSE(golden.parity.holds) << golden.parity.text;
  EXPECT_THAT(golden.parity.text, HasSubstr("ddp against its reference"));
}

TEST_F(GoldenControls, OfAnotherRunIsStaleBeforeAnythingRuns) {
  const GoldenSpec spec = short_spec("lattice_ddp_dp2_bf16", 1);
  accept(spec);
  GoldenSpec other = spec;
  other.item.seed = 1;
  other.item.settings.optimizer.learning_rate = 0.25;

  try {
    (void)check(other);
    ADD_FAILURE() << "nothing was refused";
  } catch (const GoldenError& error) {
    EXPECT_THAT(
        error.what(),
        AllOf(HasSubstr("is stale"), HasSubstr("optimizer.learning_rate: golden 0.125, here 0.25"),
              HasSubstr("SHA-256 of the initial weights"), HasSubstr("SHA-256 of the inputs"),
              HasSubstr("isoshard golden record lattice_ddp_dp2_bf16")));
  }
}

/// Names and bytes of all files.
std::map<std::string, std::string> files_of(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  if (!std::filesystem::exists(folder)) return files;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    files[entry.path().filename().string()] = content_of(entry.path());
  return files;
}

/// As if the test program had been started with this flag.
void set_golden_mode(std::string flag) {
  std::string program = "test";
  std::array<char*, 3> arguments = {program.data(), flag.data(), nullptr};
  int count = 2;
  (void)take_golden_mode(count, arguments.data());
}

TEST_F(GoldenControls, TestRunsNeverWriteAmongAcceptedGoldens) {
  const std::string name = "lattice_ddp_dp2_bf16";
  const auto before = files_of(default_golden_folder());
  const bool was_recording = is_recording_goldens();
  const TestFolder accepted, pending;

  set_golden_mode("--golden=check");
  EXPECT_THAT(golden_failure(name, kAllSteps, accepted.path(), pending.path()),
              HasSubstr("isoshard golden record " + name));
  EXPECT_TRUE(accepted.empty() && pending.empty()) << "a missing golden is a failure, and no file";
  set_golden_mode("--golden=record");
  EXPECT_EQ(golden_failure(name, kAllSteps, accepted.path(), pending.path()), "");
  EXPECT_EQ(golden_failure(name, kAllSteps, default_golden_folder(), pending.path()), "");
  set_golden_mode(was_recording ? "--golden=record" : "--golden=check");

  EXPECT_THAT(files_of(pending.path()), testing::SizeIs(1));
  EXPECT_TRUE(accepted.empty());
  EXPECT_EQ(files_of(default_golden_folder()), before);
}

TEST_F(GoldenControls, IdentityDependsOnWhatIsComputedOnly) {
  const GoldenSpec spec = select_goldens({"curve_autotp_tp2_dp2_fp32_adamw"}).at(0);
  const Golden golden = golden_identity(spec);
  for (const auto& change : std::vector<std::function<void(Case&)>>{
           [](Case& c) { c.steps = 99; }, [](Case& c) { c.dtype = Dtype::kBFloat16; },
           [](Case& c) { c.degrees.tp = 1; }, [](Case& c) { c.subject = "ddp"; },
           [](Case& c) { c.seed = 1; }, [](Case& c) { c.settings.max_grad_norm = 2; },
           [](Case& c) { c.settings.optimizer.beta2 = 0.95; },
           [](Case& c) { c.settings.zero_stage = 1; },
           [](Case& c) { c.reduction_order = ReductionOrder::kRing; },
           [](Case& c) { c.batch_size = 1; },
           [](Case& c) { c.settings.master_dtype = Dtype::kFloat64; },
           [](Case& c) { c.data.kind = DataSource::Kind::kRandomIds; }}) {
    GoldenSpec other = spec;
    change(other.item);

    EXPECT_NE(staleness(golden, golden_identity(other)), "");
  }
  EXPECT_EQ(staleness(golden, golden_identity(spec)), "");
}

}  // namespace
}  // namespace isoshard
