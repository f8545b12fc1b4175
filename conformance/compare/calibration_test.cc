// SPDX-License-Identifier: Apache-2.0
/// The judge lets every correct case pass: random ones, 500 of them or as many as
/// ISOSHARD_CALIBRATION_CASES says.
#include "suite/calibration/calibration.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string_view>
#include <vector>

#include "core/base/error.h"
#include "fixtures/cases/features.h"
#include "suite/calibration/clean_cases.h"
#include "suite/calibration/thorough_cases.h"
#include "suite/calibration/verdict_log.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kSeed = 1;

std::int64_t cases_to_run() {
  const char* const text = std::getenv("ISOSHARD_CALIBRATION_CASES");
  if (text == nullptr || *text == '\0') return 500;
  const std::string_view words = text;
  std::int64_t count = 0;
  const auto [end, error] = std::from_chars(words.data(), words.data() + words.size(), count);
  if (error != std::errc() || end != words.data() + words.size() || count < 1) {
    ADD_FAILURE() << "ISOSHARD_CALIBRATION_CASES=" << words << " is no positive number";
    return 0;
  }
  return count;
}

TEST(Calibration, NoCleanCaseRaisesAnAlarm) {
  Calibration calibration(kSeed);

  const std::int64_t cases = cases_to_run();
  for (std::int64_t index = 0; index < cases; ++index) {
    const Verdict verdict = calibration.run(index);
    EXPECT_GT(verdict.compared, 10) << repeat_command(kSeed, index);
    EXPECT_NE(verdict.status, Status::kDiverges) << verdict.reason << "\n"
                                                 << repeat_command(kSeed, index);
    EXPECT_NE(verdict.status, Status::kIncomplete) << verdict.reason << "\n"
                                                   << repeat_command(kSeed, index);
  }

  fmt::print("{}", calibration.render());
  EXPECT_EQ(calibration.cases(), cases);
  EXPECT_EQ(calibration.false_alarms().size(), 0U);
  // Later steps of AdamW in bf16, mostly: what they show is listed, and that they stay few keeps
  // the ceilings honest.
  EXPECT_LE(static_cast<double>(calibration.vacuous().size()),
            1 + 0.1 * static_cast<double>(cases));
}

// What `isoshard verify` says by default, on cases that the test above does not see.
TEST(CalibrationOfVerify, EveryCleanCaseConforms) {
  Calibration calibration(kSeed + 1, ReferenceKind::kAuto);

  const std::int64_t cases = std::min<std::int64_t>(cases_to_run(), 2000) / 4 + 1;
  for (std::int64_t index = 0; index < cases; ++index) {
    const Verdict verdict = calibration.run(index);
    EXPECT_EQ(verdict.status, Status::kConforms)
        << verdict.reason << "\n"
        << repeat_command(kSeed + 1, index) << " --reference auto";
    EXPECT_GT(verdict.equal_to_emulation.value_or(0), 10) << repeat_command(kSeed + 1, index);
  }
}

// Every subject, with the settings of verify --preset thorough.
TEST(CalibrationOfThorough, EveryCleanCaseConforms) {
  Calibration calibration(kSeed, ReferenceKind::kAuto, CaseStream::kThorough);

  constexpr std::int64_t kCases = 2000;
  for (std::int64_t index = 0; index < kCases; ++index) {
    const Verdict verdict = calibration.run(index);
    const std::string repeat = repeat_command(kSeed, index, CaseStream::kThorough);
    EXPECT_NE(verdict.status, Status::kDiverges) << verdict.reason << "\n" << repeat;
    EXPECT_NE(verdict.status, Status::kIncomplete) << verdict.reason << "\n" << repeat;
    EXPECT_GT(verdict.compared, 10) << repeat;
  }

  fmt::print("{}", calibration.render());
  EXPECT_EQ(calibration.cases(), kCases);
  EXPECT_EQ(calibration.false_alarms().size(), 0U);
  EXPECT_LE(static_cast<double>(calibration.vacuous().size()), 0.01 * static_cast<double>(kCases));
}

class FormerFalseAlarms : public ::testing::TestWithParam<std::int64_t> {};

// Of seed 3: rows that the first micro-batch does not read (607), steps of Adam that a rounding
// turns (1512, 1646), and a rank of two tokens (1545).
TEST_P(FormerFalseAlarms, RaiseNone) {
  for (const ReferenceKind kind : {ReferenceKind::kPlain, ReferenceKind::kAuto}) {
    Calibration calibration(3, kind);

    const Verdict verdict = calibration.run(GetParam());

    EXPECT_NE(verdict.status, Status::kDiverges) << verdict.reason;
    EXPECT_NE(verdict.status, Status::kIncomplete) << verdict.reason;
    EXPECT_GT(verdict.compared, 100);
  }
}
INSTANTIATE_TEST_SUITE_P(Seed3, FormerFalseAlarms, ::testing::Values(607, 1512, 1545, 1646));

TEST(CleanCases, DependOnSeedAndIndexOnly) {
  EXPECT_EQ(clean_case(7, 3).reference_slug(), clean_case(7, 3).reference_slug());
  EXPECT_NE(clean_case(7, 3).reference_slug(), clean_case(7, 4).reference_slug());
  EXPECT_NE(clean_case(7, 3).reference_slug(), clean_case(8, 3).reference_slug());
}

TEST(CleanCases, CoverWhatAUserMayChoose) {
  std::set<std::string> seen;
  for (std::int64_t index = 0; index < 300; ++index) {
    const Case c = clean_case(kSeed, index);
    ASSERT_NO_THROW(c.validate());
    ASSERT_GT(c.world_size(), 1);
    seen.insert(c.config.model_type);
    seen.insert(c.subject);
    seen.insert(std::string(name_of(c.dtype)));
    seen.insert(std::string(name_of(c.attention)));
    seen.insert(std::string(name_of(c.settings.optimizer.kind)));
    seen.insert(std::string(name_of(c.settings.loss_mean)));
    seen.insert(fmt::format("tp{}", c.degrees.tp));
    seen.insert(fmt::format("dp{}", c.degrees.dp));
    seen.insert(fmt::format("layers{}", c.config.num_layers));
    seen.insert(fmt::format("batch{}", c.batch_size));
    if (c.micro_batches > 1) seen.insert("micro-batches");
    if (c.seq_length % 2 == 1) seen.insert("odd length");
    if (c.config.vocab_size % 2 == 1) seen.insert("odd vocabulary");
    if (c.config.num_kv_heads < c.degrees.tp) seen.insert("copied kv heads");
    if (c.config.num_kv_heads < c.config.num_heads) seen.insert("grouped heads");
    if (c.data.unequal_labels) seen.insert("unequal counts");
    if (c.config.tie_word_embeddings) seen.insert("tied");
    if (c.settings.make_vocab_size_divisible_by == 1) seen.insert("split vocabulary");
    if (c.settings.make_vocab_size_divisible_by > 1) seen.insert("padded vocabulary");
    if (c.settings.label_smoothing > 0) seen.insert("smoothed labels");
    if (c.settings.autocast.has_value())
      seen.insert(fmt::format("autocast {}", name_of(*c.settings.autocast)));
    seen.insert(std::string(name_of(c.reduction_order)));
    if (c.seq_length >= 64) seen.insert("long");
  }

  for (const char* wanted : {"qwen2",
                             "qwen3",
                             "llama",
                             "gpt2",
                             "megatron_gpt",
                             "fp16",
                             "autocast bf16",
                             "autocast fp16",
                             "split vocabulary",
                             "padded vocabulary",
                             "smoothed labels",
                             "ordered",
                             "ring",
                             "tree",
                             "sum",
                             "long",
                             "ddp",
                             "autotp",
                             "fp64",
                             "fp32",
                             "bf16",
                             "eager",
                             "sdpa",
                             "sgd",
                             "adamw",
                             "global",
                             "local",
                             "tp1",
                             "tp2",
                             "tp3",
                             "tp4",
                             "dp1",
                             "dp2",
                             "dp3",
                             "layers1",
                             "layers2",
                             "layers3",
                             "batch1",
                             "micro-batches",
                             "odd length",
                             "odd vocabulary",
                             "copied kv heads",
                             "grouped heads",
                             "unequal counts",
                             "tied"}) {
    EXPECT_TRUE(seen.contains(wanted)) << wanted;
  }
}

TEST(ThoroughCases, DependOnSeedAndIndexOnlyAndExerciseEveryFeature) {
  std::vector<Case> cases;
  std::set<std::string> references;
  for (std::int64_t index = 0; index < 400; ++index) {
    cases.push_back(thorough_case(7, index));
    ASSERT_NO_THROW(cases.back().validate());
    EXPECT_GT(cases.back().world_size(), 1);
    EXPECT_LE(cases.back().world_size(), 8);
    references.insert(cases.back().reference_slug());
  }

  EXPECT_EQ(references.size(), cases.size()) << "no two are alike";
  EXPECT_EQ(thorough_case(7, 3).slug(), cases[3].slug());
  EXPECT_EQ(thorough_case(7, 3).reference_slug(), cases[3].reference_slug());
  EXPECT_NE(thorough_case(8, 3).reference_slug(), cases[3].reference_slug());
  for (const FeatureCount& count : count_features(cases))
    EXPECT_GT(count.cases, 0U) << count.feature->group << " " << count.feature->name;
}

// A calibration that was ended goes on where it was, and knows what it has.
TEST(VerdictLog, LeavesOutWhatItHasAndRefusesAnotherCalibration) {
  const std::filesystem::path file =
      std::filesystem::path(::testing::TempDir()) / fmt::format("verdicts_{}.csv", ::getpid());
  const Case c = clean_case(9, 17);
  Verdict verdict;
  verdict.status = Status::kDiverges;
  verdict.reason = "first, forward\nat x";
  {
    VerdictLog log(file, "calibrate");
    log.add(17, c, verdict);
    log.add_failure(18, c, "crashed");
  }
  std::ofstream(file, std::ios::app) << "19,conf";  // a killed run
  VerdictLog log(file, "calibrate");

  EXPECT_TRUE(log.has(17) && log.has(18));
  EXPECT_FALSE(log.has(19));
  EXPECT_EQ(log.diverging(), 1);
  EXPECT_EQ(log.failures(), 1);
  EXPECT_EQ(log.summary(),
            "2 cases in all: 0 conform, 1 diverge, 0 vacuous, 1 could not be judged\n");
  EXPECT_THROW(VerdictLog(file, "calibrate --seed 2"), FileError);
  std::ofstream(file, std::ios::app) << "20,fine,none\n";
  EXPECT_THROW(VerdictLog(file, "calibrate"), FileError);
  std::filesystem::remove(file);
}

TEST(CleanCases, ThatDivergeAreListedWithTheCommandThatRepeatsThem) {
  Calibration calibration(9);
  Verdict verdict;
  verdict.status = Status::kDiverges;
  verdict.reason = "first forward at x";
  TensorComparison t;
  t.stats.unequal_values = 1;
  t.stats.sum_sq_reference = 4;
  t.stats.sum_sq_diff = 1;
  t.allowed_relative_error = 0.25;
  t.allowed_scale_error = 1;
  verdict.tensors = {t};

  calibration.add(17, clean_case(9, 17), verdict);
  const std::string text = calibration.render();

  EXPECT_EQ(calibration.false_alarms().size(), 1U);
  EXPECT_EQ(calibration.comparisons(), 1);
  EXPECT_THAT(text, HasSubstr("1 false alarms"));
  EXPECT_THAT(text, HasSubstr("first forward at x"));
  EXPECT_THAT(text, HasSubstr("calibrate --seed 9 --first 17 --count 1"));
  EXPECT_THAT(text, HasSubstr("| relative error / allowed | 1 | 2 | 2 |"));
}

}  // namespace
}  // namespace isoshard
