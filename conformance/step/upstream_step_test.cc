// SPDX-License-Identifier: Apache-2.0
// Settings that give the arithmetic of other systems where ours differs: each is, bit by bit, what
// it declares, and a declaration without it is seen.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "harness/judge/judge.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

Case averaged(GradAverage average, Case item) {
  item.settings.grad_average = average;
  return item;
}

Case with_torchs_norm(Case item) {
  item.settings.clip_norm = ClipNorm::kTorch;
  item.settings.max_grad_norm = 0.1;
  return item;
}

Case of_micro_batches(int number, Case item) {
  item.micro_batches = number;
  item.data.unequal_labels = true;
  return item;
}

Case with_their_mean(Case item) {
  item.settings.loss_mean = LossMean::kMicroBatch;
  return of_micro_batches(2, std::move(item));
}

Case accumulated_in_fp32(Case item) {
  item.settings.accumulate_dtype = Dtype::kFloat32;
  return of_micro_batches(3, std::move(item));
}

Case distributed(Case item) {
  item.settings.distributed_optimizer = true;
  return item;
}

Case in_two_stages(Case item) {
  item.micro_batches = 2;
  item.batch_size = 1;
  return item;
}

class UpstreamStep : public testing::TestWithParam<Case> {};

TEST_P(UpstreamStep, IsBitEqualToItsEmulation) {
  expect_bit_equal_to_the_subject(GetParam());
}

// Degrees of 3: to multiply by a third, to divide by 3 and to round before or after a sum differ.
std::vector<Case> cases() {
  constexpr Dtype kBf16 = Dtype::kBFloat16, kFp32 = Dtype::kFloat32;
  const auto of = [](const char* subject, const Degrees& degrees, Dtype dtype) {
    return step_case(subject, degrees, dtype);
  };
  return {
      averaged(GradAverage::kMultiplyFirst, of("ddp", {.dp = 3}, kFp32)),
      averaged(GradAverage::kDivideFirst,
               in_order(ReductionOrder::kRing, with_torchs_norm(of("ddp", {.dp = 3}, kBf16)))),
      averaged(GradAverage::kDivideAround, with_torchs_norm(of("ddp", {.dp = 3}, Dtype::kFloat64))),
      averaged(GradAverage::kMultiplyLast,
               accumulated_in_fp32(of("autotp", {.dp = 3, .tp = 2}, kBf16))),
      averaged(
          GradAverage::kMultiplyLast,
          with_zero(1, accumulated_in_fp32(with_masters(of("autotp", {.dp = 3}, kFp32), kBf16)))),
      averaged(
          GradAverage::kDivideFirst,
          with_zero(2, accumulated_in_fp32(with_masters(of("autotp", {.dp = 3}, kFp32), kBf16)))),
      averaged(GradAverage::kMultiplyFirst, with_their_mean(of("megatron", {.dp = 3}, kFp32))),
      averaged(GradAverage::kDivideLast,
               distributed(with_masters(of("megatron", {.dp = 3, .tp = 2}, kFp32), kBf16))),
      averaged(GradAverage::kDivideAround,
               in_order(ReductionOrder::kTree, with_torchs_norm(of("fsdp_tp", {.dp = 3}, kBf16)))),
      with_torchs_norm(of("nd", {.dp = 3}, kFp32)),
      averaged(GradAverage::kMultiplyFirst, with_their_mean(of("nd", {.dp = 3}, kFp32))),
  };
}

INSTANTIATE_TEST_SUITE_P(Cases, UpstreamStep, testing::ValuesIn(cases()), case_name);

// Stages record in another order than the emulation: the judge, who allows nothing, compares them.
TEST(UpstreamStepBounds, AreNotNeededOverStages) {
  (void)run_beside_its_emulation(averaged(
      GradAverage::kMultiplyFirst,
      with_their_mean(in_two_stages(step_case("nd", {.pp = 2, .dp = 3}, Dtype::kFloat32)))));
}

// With the loss, the counts and the norm of a single process.
TEST(UpstreamStepBounds, HoldForEachSetting) {
  expect_matches_single_process(
      averaged(GradAverage::kMultiplyFirst, step_case("ddp", {.dp = 3}, Dtype::kBFloat16)));
  expect_matches_single_process(with_their_mean(step_case("ddp", {.dp = 3})));
  expect_matches_single_process(
      accumulated_in_fp32(step_case("autotp", {.dp = 3}, Dtype::kBFloat16)));
}

/// What the judge, who allows nothing, finds first if a case declares something else.
std::string first_finding(const Case& item, const std::function<void(NumericsSpec&)>& change) {
  NumericsSpec other = numerics_of(item);
  change(other);
  const Reference reference = make_emulated_reference(item, other);
  const Verdict verdict = judge(reference, run_case(item, reference), exact_policy_of(item));
  if (verdict.status != Status::kDiverges || verdict.findings.empty()) return "nothing";
  const Finding& finding = verdict.findings.front();
  return finding.key.kind == RecordKind::kGrad ? "a gradient" : finding.key.name;
}

void average_in_the_collective(NumericsSpec& numerics) {
  numerics.data.parameter_gradient.reduction = Reduction::kAvg;
  numerics.data.parameter_gradient.before = numerics.data.parameter_gradient.after = {};
}

TEST(UpstreamStepControls, AnAverageThatDividesElsewhereIsSeen) {
  const Case first = averaged(GradAverage::kMultiplyFirst, step_case("ddp", {.dp = 3}));
  const Case last = averaged(GradAverage::kMultiplyLast, step_case("ddp", {.dp = 3}));

  EXPECT_EQ(first_finding(first, average_in_the_collective), "a gradient");
  EXPECT_EQ(first_finding(last, average_in_the_collective), "a gradient");
  EXPECT_EQ(first_finding(first,
                          [](NumericsSpec& numerics) {
                            numerics.data.parameter_gradient.before = {3, true};
                          }),
            "a gradient");
}

// Halves are exact: two ranks cannot tell the settings apart.
TEST(UpstreamStepControls, AnAverageOfTwoRanksIsTheSameEverywhere) {
  const Case item = averaged(GradAverage::kMultiplyFirst, step_case("ddp", {.dp = 2}));

  EXPECT_EQ(first_finding(item, average_in_the_collective), "nothing");
}

TEST(UpstreamStepControls, ANormInAnotherDtypeIsSeen) {
  const Case item = with_torchs_norm(step_case("fsdp_tp", {.dp = 3}, Dtype::kBFloat16));

  EXPECT_EQ(first_finding(item, [](NumericsSpec& numerics) { numerics.norm.is_torchs = false; }),
            "grad_norm");
}

TEST(UpstreamStepControls, SumsInAnotherDtypeAreSeen) {
  const Case item = accumulated_in_fp32(step_case("autotp", {.dp = 3}, Dtype::kBFloat16));

  EXPECT_EQ(
      first_finding(item, [](NumericsSpec& numerics) { numerics.data.accumulation.dtype.reset(); }),
      "a gradient");
}

TEST(UpstreamStepControls, AnotherMeanIsSeen) {
  const Case item = with_their_mean(step_case("ddp", {.dp = 2}));
  const Case global = with(item, [](Case& c) { c.settings.loss_mean = LossMean::kGlobal; });

  const Verdict verdict =
      judge(reference_of(global), run_case(item, reference_of(global)), policy_of(item));

  EXPECT_EQ(verdict.status, Status::kDiverges);
}

TEST(UpstreamStepRefusals, NameWhatIsNotBuilt) {
  const auto refuses = [](const Case& item) {
    try {
      item.validate();
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using testing::HasSubstr;

  EXPECT_THAT(refuses(with_torchs_norm(step_case("fsdp_tp", {.dp = 2, .tp = 2}))),
              HasSubstr("tp and pp must be 1 with --clip-norm torch, got tp 2 and pp 1"));
  EXPECT_THAT(refuses(accumulated_in_fp32(step_case("autotp", {.tp = 2}, Dtype::kBFloat16))),
              HasSubstr("dp must be at least 2 with --accumulate-dtype fp32"));
  EXPECT_THAT(refuses(accumulated_in_fp32(step_case("autotp", {.dp = 2}, Dtype::kFloat64))),
              HasSubstr("must be a float at least as wide as fp64 parameters, got fp32"));
  EXPECT_THAT(refuses(averaged(GradAverage::kDivideLast,
                               with(step_case("nd", {.dp = 4}),
                                    [](Case& c) { c.settings.nd.dp_replicate = 2; }))),
              HasSubstr("--dp-replicate must be 1 with --grad-average divide-last"));
}

}  // namespace
}  // namespace isoshard
