// SPDX-License-Identifier: Apache-2.0
/// docs/reference/flags.md says how flags of published scripts are taken; here every row of its
/// table is parsed.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <algorithm>

#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <set>
#include <sstream>

#include "app/commands.h"
#include "app/options/train_options.h"
#include "app/options/verify_inputs.h"
#include "app/options/verify_options.h"
#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "fixtures/cases/features.h"
#include "fixtures/cases/presets.h"
#include "fixtures/cases/setting.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

/// In their words, from the two documents.
constexpr const char* kPublished[] = {
    "--model_name",        "--num_layers",      "--batch_size",   "--seq_length",
    "--tp_size",           "--dp_size",         "--num_workers",  "--impl",
    "--learning_rate",     "--debug_steps",     "--autocast",     "--init_weights_path",
    "--save_init_weights", "--output_dir",      "--input_dir",    "--num_epochs",
    "--log_interval",      "--loss_output_dir", "--storage_path", "--output"};

struct Row {
  std::vector<std::string> arguments;  ///< "--tp_size", "2"
  std::string command, option;         ///< "verify", "tp"; empty where it is planned
};

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) {
    const auto first = part.find_first_not_of(" `"), last = part.find_last_not_of(" `");
    parts.push_back(first == std::string::npos ? "" : part.substr(first, last - first + 1));
  }
  return parts;
}

std::vector<Row> rows() {
  std::ifstream page(std::string(ISOSHARD_DOCS_DIR) + "/flags.md");
  std::vector<Row> result;
  for (std::string line; std::getline(page, line);) {
    if (!line.starts_with("| `--")) continue;
    const std::vector<std::string> cells = split(line, '|');
    Row row{split(cells.at(1), ' '), "", ""};
    const std::vector<std::string> here = split(cells.at(3), ' ');
    if (here.at(0) != "planned:") {
      row.command = here.at(0);
      row.option = here.at(1).substr(2);
    }
    result.push_back(std::move(row));
  }
  return result;
}

OptionTable table_of(const std::string& command) {
  OptionTable table;
  for (const Command& known :
       {verify_command(), train_command(), converge_command(), plot_command(), compare_command()}) {
    if (known.name == command) known.declare(table);
  }
  return table;
}

TEST(Flags, OfThePublishedScriptsAllWorkAsThePageSays) {
  std::set<std::string> seen;
  for (const Row& row : rows()) {
    SCOPED_TRACE(fmt::format("{} {}", row.command, row.arguments.front()));
    seen.insert(row.arguments.front());
    if (row.command.empty()) continue;
    std::vector<std::string> arguments = row.arguments;
    if (arguments.front() == "--autocast" || arguments.front() == "--save_init_weights")
      arguments.emplace_back("--shuffle");

    const ParsedOptions parsed = parse_options(table_of(row.command), arguments);

    EXPECT_TRUE(parsed.given(row.option));
    EXPECT_EQ(parsed.origins.at(row.option), "command line");
  }
  EXPECT_EQ(seen, std::set<std::string>(std::begin(kPublished), std::end(kPublished)));
}

TEST(Flags, ThatNobodyPublishedAreRefused) {
  EXPECT_THAT(
      [] {
        (void)parse_options(table_of("verify"), {"--tp_sise", "2"});
      },
      ThrowsMessage<UsageError>(HasSubstr("tp")));
}

VerifyRequest requested(const std::vector<std::string>& arguments) {
  return verify_request_of(parse_options(table_of("verify"), arguments));
}

/// Of the cases that `verify --preset small` and these flags make those that have the feature.
std::size_t num_with(const Feature& feature, const std::string& flags) {
  std::vector<std::string> arguments = split(flags, ' ');
  std::erase(arguments, "");
  arguments.insert(arguments.begin(), {"--preset", "small"});
  const std::vector<Case> cases = requested(arguments).cases;
  return static_cast<std::size_t>(std::ranges::count_if(cases, feature.is_in));
}

TEST(Flags, OfEachFeatureTurnItOn) {
  std::size_t on_without = 0;
  for (const Feature& feature : features()) {
    SCOPED_TRACE(feature.name);
    EXPECT_GT(num_with(feature, std::string(feature.flags)), 0U) << feature.flags;
    on_without += num_with(feature, "") > 0 ? 1 : 0;
  }
  EXPECT_LT(on_without, features().size() / 3) << "most are off without their flags";
}

TEST(Flags, BesideThePresetThoroughNarrowAndOverride) {
  const std::vector<Case> all = requested({"--preset", "thorough"}).cases;
  const std::vector<Case> of_nd = requested({"--preset", "thorough", "--subjects", "nd"}).cases;
  const VerifyRequest fp32 = requested({"--preset", "thorough", "--dtype", "fp32"});
  const std::vector<Case> one_step = requested({"--preset", "thorough", "--steps", "1"}).cases;

  EXPECT_EQ(all.size(), preset_cases("thorough").size());
  EXPECT_GT(of_nd.size(), 5U);
  for (const Case& item : of_nd) EXPECT_EQ(item.subject, "nd");
  for (const Case& item : fp32.cases) EXPECT_EQ(item.dtype, Dtype::kFloat32);
  // a scale is of fp16 only
  ASSERT_EQ(fp32.notes.size(), 1U);
  EXPECT_THAT(fp32.notes.front(), HasSubstr("are left out, as these options do not fit them"));
  EXPECT_EQ(one_step.size(), all.size());
  for (const Case& item : one_step) EXPECT_EQ(item.steps, 1);
  EXPECT_THAT(
      [] {
        (void)requested({"--preset", "thorough", "--subjects", "nd", "--tp", "7"});
      },
      ThrowsMessage<UsageError>(HasSubstr("7")));
}

TEST(Flags, CoverageIsOfTheChosenCasesAndNothingBesideIt) {
  EXPECT_TRUE(requested({"--preset", "small", "--coverage"}).coverage);
  EXPECT_FALSE(requested({"--preset", "small"}).coverage);
  EXPECT_THAT(
      [] {
        (void)requested({"--coverage", "--output-dir", "out"});
      },
      ThrowsMessage<UsageError>(HasSubstr("--output-dir must be left out with --coverage")));
}

TEST(Flags, OfTheCommandsThatArePublishedMeanWhatTheySay) {
  const VerifyRequest request =
      requested({"--model_name",  "tiny", "--impl",        "deepspeed", "--tp_size",       "2",
                 "--dp_size",     "2",    "--num_workers", "4",         "--batch_size",    "3",
                 "--seq_length",  "9",    "--num_layers",  "1",         "--learning_rate", "1e-5",
                 "--debug_steps", "2",    "--autocast"});

  ASSERT_EQ(request.cases.size(), 1U);
  const Case& item = request.cases.front();
  EXPECT_EQ(item.subject, "autotp");
  EXPECT_EQ(item.world_size(), 4);
  EXPECT_EQ(item.batch_size, 3);
  EXPECT_EQ(item.seq_length, 9);
  EXPECT_EQ(item.config.num_layers, 1);
  EXPECT_EQ(item.settings.optimizer.learning_rate, 1e-5);
  EXPECT_EQ(item.steps, 2);
  EXPECT_EQ(item.settings.autocast, Dtype::kBFloat16);
}

TEST(Flags, OfTheBenchmarkToolMeanTheSameInVerify) {
  const VerifyRequest request = requested({"--model_name",
                                           "tiny",
                                           "--num_layers",
                                           "0",
                                           "--attn_impl",
                                           "sdpa",
                                           "--impl",
                                           "fsdp_dtensor",
                                           "--tp_size",
                                           "2",
                                           "--dp_size",
                                           "2",
                                           "--nproc_per_node",
                                           "4",
                                           "--use_vocab_parallel",
                                           "--batch_size",
                                           "1",
                                           "--seq_length",
                                           "8",
                                           "--num_training_steps",
                                           "3",
                                           "--weight_decay",
                                           "0.01",
                                           "--gradient_accumulation_steps",
                                           "2",
                                           "--max_grad_norm",
                                           "0.5",
                                           "--activation_checkpointing",
                                           "--dtype",
                                           "bf16",
                                           "--seed",
                                           "42"});

  ASSERT_EQ(request.cases.size(), 1U);
  const Case& item = request.cases.front();
  EXPECT_EQ(item.subject, "fsdp_tp");
  EXPECT_EQ(item.config.num_layers, 2) << "0: the model's own";
  EXPECT_EQ(item.world_size(), 4);
  EXPECT_EQ(item.settings.make_vocab_size_divisible_by, 1);
  EXPECT_EQ(item.steps, 3);
  EXPECT_EQ(item.micro_batches, 2);
  EXPECT_EQ(item.settings.recompute_every, 1);
  EXPECT_EQ(item.seed, 42U);
  EXPECT_EQ(requested({"--model", "tiny", "--impl", "autotp", "--tp", "2", "--vocab-parallel",
                       "--no_vocab_parallel"})
                .cases.front()
                .settings.make_vocab_size_divisible_by,
            0);
}

TEST(Flags, ASwitchThatTheEnvironmentSetsToFalseChangesNothing) {
  int switches = 0;
  for (const Setting& setting : settings()) {
    if (setting.flag.kind != FlagKind::kSwitch) continue;
    std::string variable = "ISOSHARD_" + std::string(setting.flag.name);
    for (char& c : variable)
      c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    for (const char* const subject : {"ddp", "autotp", "megatron"}) {
      const std::vector<std::string> arguments = {"--model", "tiny", "--subjects", subject};
      const std::string plain = requested(arguments).cases.front().slug();
      ::setenv(variable.c_str(), "false", 1);
      EXPECT_EQ(requested(arguments).cases.front().slug(), plain) << variable;
      ::unsetenv(variable.c_str());
    }
    ++switches;
  }
  EXPECT_GE(switches, 5);
}

TEST(Flags, OfALossScaleMeanWhatTheySay) {
  const auto scale = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(),
                     {"--model", "tiny", "--dp", "2", "--dtype", "fp16", "--master-dtype", "fp32"});
    return requested(arguments).cases.front().settings.loss_scale;
  };
  using Kind = LossScaleSettings::Kind;

  EXPECT_EQ(scale({}), LossScaleSettings{});
  EXPECT_EQ(scale({"--loss-scale", "none"}), LossScaleSettings{});
  EXPECT_EQ(scale({"--loss-scale", "dynamic"}),
            (LossScaleSettings{Kind::kDynamic, 65536, 2, 0.5, 2000}));
  EXPECT_EQ(scale({"--loss_scale", "128"}), (LossScaleSettings{Kind::kStatic, 128}));
  EXPECT_EQ(
      scale({"--loss-scale", "dynamic", "--loss-scale-initial", "8", "--loss-scale-growth-interval",
             "3", "--loss-scale-growth", "4", "--loss-scale-backoff", "0.25"}),
      (LossScaleSettings{Kind::kDynamic, 8, 4, 0.25, 3}));
  EXPECT_THAT(
      [&] {
        (void)scale({"--loss-scale", "large"});
      },
      ThrowsMessage<UsageError>(
          HasSubstr("--loss-scale must be dynamic, none or a number that stays, got large")));
  EXPECT_THAT(
      [&] {
        (void)scale({"--loss-scale", "8", "--loss-scale-growth", "3"});
      },
      ThrowsMessage<UsageError>(HasSubstr("--loss-scale-growth needs --loss-scale dynamic")));
  EXPECT_THAT(
      [&] {
        (void)scale({"--loss-scale", "0"});
      },
      ThrowsMessage<UsageError>(
          HasSubstr("the loss scale must be above 0 and finite in fp32, got 0")));
  EXPECT_THAT(
      [] {
        (void)requested({"--model", "tiny", "--dp", "2", "--loss-scale", "dynamic"});
      },
      ThrowsMessage<UsageError>(HasSubstr("got fp32 parameters")));
}

TEST(Flags, NameTheFullyShardedSubjectAsThePublishedScriptsDo) {
  for (const char* const name : {"fsdp", "fsdp2", "fsdp_tp"}) {
    const VerifyRequest request =
        requested({"--model", "tiny", "--subjects", name, "ddp", "--tp", "2", "--dp", "2",
                   "--dtype", "bf16", "--vocab-parallel", "--reduce-dtype", "fp32",
                   "--output-dtype", "fp64", "--master-dtype", "fp32"});

    ASSERT_EQ(request.cases.size(), 2U);
    const auto sharded = std::find_if(request.cases.begin(), request.cases.end(),
                                      [](const Case& c) { return c.subject == "fsdp_tp"; });
    ASSERT_NE(sharded, request.cases.end());
    EXPECT_EQ(sharded->slug().find("fsdp_tp_tiny_tp2_dp2_bf16"), 0U) << sharded->slug();
    EXPECT_EQ(sharded->settings.reduce_dtype, Dtype::kFloat32);
    EXPECT_EQ(sharded->settings.output_dtype, Dtype::kFloat64);
    EXPECT_EQ(sharded->settings.make_vocab_size_divisible_by, 1);
    EXPECT_FALSE(
        request.cases[request.cases[0].subject == "ddp" ? 0 : 1].settings.reduce_dtype.has_value());
  }
  EXPECT_THAT(
      [] {
        (void)requested(
            {"--model", "tiny", "--subjects", "ddp", "--dp", "2", "--reduce-dtype", "fp32"});
      },
      ThrowsMessage<UsageError>(HasSubstr("take --subjects fsdp_tp")));
}

TEST(Flags, OfTheTrainingScriptsMeanWhatTheySay) {
  const TrainRequest request = train_request_of(parse_options(
      table_of("train"),
      {"--model_name",      "small",  "--num_workers",  "4", "--tp_size",      "2",
       "--dp_size",         "2",      "--batch_size",   "3", "--num_epochs",   "1",
       "--learning_rate",   "1e-5",   "--debug_steps",  "5", "--log_interval", "2",
       "--loss_output_dir", "curves", "--storage_path", "x", "--impl",         "deepspeed"}));

  ASSERT_EQ(request.cases.size(), 1U);
  EXPECT_EQ(request.cases[0].subject, "autotp");
  EXPECT_EQ(request.cases[0].world_size(), 4);
  EXPECT_EQ(request.cases[0].steps, 5);
  EXPECT_EQ(request.cases[0].settings.optimizer.kind, OptimizerSettings::Kind::kAdamW);
  EXPECT_EQ(request.log_interval, 2);
  EXPECT_EQ(request.output_dir, "curves");
  EXPECT_EQ(request.reference.subject, "reference");
  EXPECT_EQ(request.reference.degrees.dp, 2);
  ASSERT_EQ(request.notes.size(), 1U);
  EXPECT_THAT(request.notes[0], HasSubstr("--storage-path"));
}

TrainRequest train_requested(const std::vector<std::string>& arguments) {
  return train_request_of(parse_options(table_of("train"), arguments));
}

TEST(Flags, OfTrainGiveMegatronsMastersToAllRunsInAnyOrder) {
  for (const char* const subjects : {"megatron,ddp", "ddp,megatron", "autotp,megatron,ddp"}) {
    const TrainRequest request =
        train_requested({"--model", "tiny", "--subjects", subjects, "--dtype", "bf16"});

    EXPECT_EQ(request.reference.settings.master_dtype, Dtype::kFloat32) << subjects;
    for (const Case& item : request.cases)
      EXPECT_EQ(item.settings.master_dtype, Dtype::kFloat32) << subjects << " " << item.subject;
    EXPECT_EQ(request.notes.size(), 1U) << subjects;
  }
}

TEST(Flags, OfTrainTurnEpochsIntoStepsAsTheSamplerTakesThem) {
  const TestFolder folder;
  std::vector<std::uint16_t> ids(7 * 4);  // 7 samples
  std::iota(ids.begin(), ids.end(), std::uint16_t{1});
  const std::string path = (folder / "ids.bin").string();
  write_file_atomically(path,
                        {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(ids[0])});
  const auto steps = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"--model", "tiny", "--subjects", "ddp", "--dp", "2", "--batch-size",
                               "1", "--data", path, "--seq-length", "4", "--num-epochs", "3"});
    return train_requested(more).reference.steps;
  };

  EXPECT_EQ(steps({}), 12) << "8 samples an epoch, 2 a step";
  EXPECT_EQ(steps({"--tail", "drop"}), 9);
  EXPECT_EQ(steps({"--tail", "drop", "--micro-batches", "2"}), 4);
  EXPECT_EQ(steps({"--steps", "5"}), 5) << "at most so many";
}

TEST(Flags, OfTrainTakeNumWorkersForTheDegreeOfDdpAlone) {
  EXPECT_EQ(train_requested({"--model", "tiny", "--subjects", "ddp", "--num-workers", "3"})
                .reference.degrees.dp,
            3);
  EXPECT_EQ(train_requested({"--model", "tiny", "--subjects", "ddp,autotp", "--num-workers", "4"})
                .reference.degrees.dp,
            2);
}

TEST(Flags, OfTrainTakeTheRateOfSgdForWhichTheBoundsHold) {
  EXPECT_EQ(train_requested({"--model", "tiny", "--optimizer", "sgd"})
                .reference.settings.optimizer.learning_rate,
            0.1);
  EXPECT_EQ(train_requested({"--model", "tiny", "--optimizer", "sgd", "--dtype", "bf16"})
                .reference.settings.optimizer.learning_rate,
            0.02);
}

// What verify then judges is the beginning of the same run.
TEST(Flags, OfTheCommandToLookFurtherAreThoseOfTheRun) {
  const std::vector<std::vector<std::string>> runs = {
      {"--subjects", "megatron,ddp", "--dtype", "bf16"},
      {"--subjects", "autotp,ddp", "--lr-schedule", "cosine", "--warmup-steps", "10", "--min-lr",
       "1e-5"},
      {"--subjects", "fsdp_tp", "--optimizer", "sgd", "--autocast", "--recompute"},
      {"--fault", "dp_sum_missing", "--dtype", "bf16"}};
  for (const std::vector<std::string>& arguments : runs) {
    const TrainRequest request = train_requested(arguments);
    ASSERT_FALSE(request.cases.empty());
    for (const Case& item : request.cases) {
      std::istringstream command(look_further(request, item, 8));
      std::vector<std::string> words;
      for (std::string word; command >> word;) words.push_back(word);
      ASSERT_EQ(words.at(1), "verify");

      const VerifyRequest looked = requested({words.begin() + 2, words.end()});

      Case expected = item;
      expected.settings.schedule.total_steps = item.learning_rate_schedule().total_steps;
      expected.steps = 8;
      ASSERT_EQ(looked.cases.size(), 1U) << look_further(request, item, 8);
      Case judged = looked.cases.front();
      judged.settings.schedule.total_steps = judged.learning_rate_schedule().total_steps;
      if (expected.settings.schedule.kind == LearningRateSettings::Kind::kConstant)
        expected.settings.schedule.total_steps = judged.settings.schedule.total_steps;
      // What AdamW does not read is no difference.
      if (judged.settings.optimizer.kind == OptimizerSettings::Kind::kAdamW)
        judged.settings.optimizer.momentum = expected.settings.optimizer.momentum;
      EXPECT_EQ(judged.reference_slug(), expected.reference_slug())
          << look_further(request, item, 8);
    }
  }
}

TEST(Flags, NumWorkersIsTheDegreeOfDdpAndMustFitOthers) {
  EXPECT_EQ(requested({"--model", "tiny", "--impl", "ddp", "--num_workers", "3", "--dtype", "fp32"})
                .cases.front()
                .degrees.dp,
            3);
  EXPECT_THAT(
      [] {
        (void)requested({"--model", "tiny", "--subjects", "autotp", "--tp", "2", "--dp", "2",
                         "--num_workers", "3"});
      },
      ThrowsMessage<UsageError>(HasSubstr("has 4 ranks (dp 2 x tp 2)")));
}

TEST(Flags, SayWhereWeightsAndBatchesGo) {
  const auto files = [](const std::vector<std::string>& arguments) {
    return input_files_of(parse_options(table_of("verify"), arguments));
  };

  EXPECT_EQ(files({"--init_weights_path", "w", "--save_init_weights"}).save_weights, "w");
  EXPECT_EQ(files({"--init_weights_path", "w", "--save_init_weights"}).weights, "");
  EXPECT_EQ(files({"--init_weights_path", "w"}).weights, "w");
  EXPECT_EQ(files({"--output_dir", "out", "--save_init_weights", "--save_batch"}).save_weights,
            "out/init_weights.safetensors");
  EXPECT_EQ(files({"--output_dir", "out", "--save_init_weights", "--save_batch"}).save_batch,
            "out/batch.safetensors");
  EXPECT_EQ(files({"--save-init-weights", "a", "--init-weights", "b"}).save_weights, "a");
  EXPECT_EQ(files({"--save-batch=c"}).save_batch, "c");
  EXPECT_THAT([&] { (void)files({"--save_init_weights"}); },
              ThrowsMessage<UsageError>(HasSubstr("must know where to write")));
  EXPECT_THAT(
      [&] {
        (void)files({"--input_dir", "/nonexistent"});
      },
      ThrowsMessage<FileError>(HasSubstr("has neither")));
  EXPECT_THAT(
      [&] {
        (void)files({"--input_dir", "x", "--batch", "y"});
      },
      ThrowsMessage<UsageError>(HasSubstr("leave one out")));
  EXPECT_THAT(
      [&] {
        (void)files({"--batch", "y", "--shuffle"});
      },
      ThrowsMessage<UsageError>(HasSubstr("the samples and their order")));
}

}  // namespace
}  // namespace isoshard
