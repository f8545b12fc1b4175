// SPDX-License-Identifier: Apache-2.0
// `bench` through the whole program: files, fields, refusals, the gate.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "app/options/bench_options.h"
#include "app/testing/malformed_rows.h"
#include "harness/world/machine.h"
#include "suite/bench/formulas/memory_model.h"
#include "suite/testing/json_schema.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using malformed::Arguments;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

/// The tool's two matched commands, of a tiny model and few steps.
Arguments tiny_bench(const std::string& impl, Arguments more = {}) {
  Arguments all = {
      "bench", "--impl",         impl,     "--model_name",         "tiny", "--dp_size",
      "2",     "--tp_size",      "2",      "--batch_size",         "1",    "--seq_length",
      "16",    "--warmup_steps", "1",      "--num_training_steps", "3",    "--log_interval",
      "1",     "--dtype",        "float32"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

ChildResult run_bench_in(const TestFolder& folder, const Arguments& arguments) {
  return malformed::run_isoshard(folder.path(), arguments, [&] {
    ::setenv("XDG_CACHE_HOME", (folder.path() / "cache").c_str(), 1);
  });
}

json read_results(const fs::path& path) {
  std::ifstream file(path);
  return json::parse(file);
}

Schema bench_schema() {
  return Schema(read_results(fs::path(ISOSHARD_DOCS_DIR) / "bench.schema.json"));
}

TEST(BenchCommand, WritesTheFileOfTheToolWithItsFieldsForBothMatchedCommands) {
  const TestFolder folder;
  for (const std::string impl : {"autotp", "fsdp_dtensor"}) {
    const ChildResult result =
        run_bench_in(folder, tiny_bench(impl, {"--ungated", "--report", impl + ".json"}));

    ASSERT_EQ(result.exit_code, 0) << result.output << result.error;
    const fs::path file = folder.path() / "results" / ("results_" + impl + "_tp2_dp2.json");
    ASSERT_TRUE(fs::exists(file));
    const json results = read_results(file);
    EXPECT_THAT(bench_schema().problem(results), IsEmpty());
    EXPECT_EQ(results["config"]["impl"], impl);
    EXPECT_EQ(results["summary"]["num_steps"], 2);
    EXPECT_EQ(results["steps"][0]["step"], 1) << "the warm-up is not there";
    EXPECT_EQ(results["ranks"].size(), 4U);
    EXPECT_EQ(results["summary"]["overlap"]["hidden_share"], 0) << "collectives of shm block";
    const json report = read_results(folder.path() / (impl + ".json"));
    EXPECT_THAT(
        Schema(read_results(fs::path(ISOSHARD_DOCS_DIR) / "report.schema.json")).problem(report),
        IsEmpty());
    ASSERT_EQ(report["benchmarks"].size(), 1U);
    EXPECT_EQ(report["benchmarks"][0]["status"], "measured");
    EXPECT_EQ(report["benchmarks"][0]["result"], results);
  }
}

TEST(BenchCommand, DrawsTheLastStepOfEveryRankOnOneClock) {
  const TestFolder folder;
  const ChildResult result =
      run_bench_in(folder, tiny_bench("autotp", {"--ungated", "--report", "page.html"}));

  ASSERT_EQ(result.exit_code, 0) << result.output << result.error;
  const json results = read_results(folder.path() / "results/results_autotp_tp2_dp2.json");
  ASSERT_EQ(results["timeline"]["ranks"].size(), 4U);
  EXPECT_EQ(results["timeline"]["step"], 2);
  double first = 1, longest = 0;
  for (const json& lane : results["timeline"]["ranks"]) {
    EXPECT_EQ(lane["cut"], false);
    const json& spans = lane["spans"];
    ASSERT_GT(spans.size(), 20U);
    for (std::size_t i = 1; i < spans.size(); ++i) EXPECT_EQ(spans[i][1], spans[i - 1][2]);
    first = std::min(first, spans.front()[1].get<double>());
    longest = std::max(longest, spans.back()[2].get<double>() - spans.front()[1].get<double>());
  }
  EXPECT_EQ(first, 0);
  EXPECT_NEAR(longest, 1e3 * results["steps"].back()["step_time_s"].get<double>(), 1e-3);
  std::ifstream file(folder.path() / "page.html");
  const std::string page(std::istreambuf_iterator<char>(file), {});
  EXPECT_THAT(page, AllOf(HasSubstr("<strong>Measured</strong>"), HasSubstr("Timeline of step 2"),
                          HasSubstr("Collectives by purpose"), HasSubstr("row_parallel.forward"),
                          HasSubstr("<code>isoshard bench")));
}

// The first stage gets gradients that the second one has not begun to make when it goes on.
TEST(BenchCommand, MeasuresWhatAPipelineHides) {
  const TestFolder folder;
  Arguments pipeline =
      tiny_bench("nd", {"--ungated", "--pp", "2", "--gradient_accumulation_steps", "4"});
  pipeline[6] = pipeline[8] = "1";

  const ChildResult result = run_bench_in(folder, pipeline);

  ASSERT_EQ(result.exit_code, 0) << result.output << result.error;
  const json overlap =
      read_results(folder.path() / "results/results_nd_tp1_dp1_pp2.json")["summary"]["overlap"];
  EXPECT_GT(overlap["hidden_share"].get<double>(), 0);
  EXPECT_LT(overlap["hidden_share"].get<double>(), 1);
  EXPECT_GT(overlap["hidden_ms"].get<double>(), 0);
}

/// Lines above 80 columns but those that begin with one of these words, which are sentences.
std::string wide_lines(const std::string& text, const std::vector<std::string>& sentences) {
  std::istringstream lines(text);
  std::string wide;
  for (std::string line; std::getline(lines, line);) {
    const bool is_sentence = std::ranges::any_of(
        sentences, [&](const std::string& words) { return line.starts_with(words); });
    if (line.size() > 80 && !is_sentence) wide += line + "\n";
  }
  return wide;
}

TEST(BenchCommand, PartsOfAStepAddUpToItAndTokensAreThoseOfTheGlobalBatch) {
  const TestFolder folder;
  const ChildResult result = run_bench_in(
      folder, tiny_bench("autotp", {"--ungated", "--gradient_accumulation_steps", "3"}));

  ASSERT_EQ(result.exit_code, 0) << result.error;
  const json results = read_results(folder.path() / "results/results_autotp_tp2_dp2.json");
  for (const json& step : results["steps"]) {
    const double whole = step["step_time_s"];
    double sum = 0;
    for (const char* const part : {"forward", "backward", "optimizer", "communication", "other"}) {
      const double own = step[std::string(part) + "_time_s"];
      EXPECT_GT(own, 0) << part;
      sum += own;
    }
    EXPECT_NEAR(sum, whole, 1e-6 * whole + 1e-8);
    // dp 2 x 3 micro-batches x 1 sample of 16 tokens
    EXPECT_NEAR(step["tokens_per_sec"].get<double>() * whole, 96, 1e-6);
    EXPECT_NEAR(step["samples_per_sec"].get<double>() * whole, 6, 1e-6);
    EXPECT_GT(step["memory_peak_all_ranks_gb"].get<double>(),
              3 * step["memory_peak_gb"].get<double>());
  }
  double percent = 0;
  for (const auto& [name, share] : results["summary"]["timing_breakdown"].items())
    percent += share.get<double>();
  EXPECT_NEAR(percent, 100, 1e-3);
  std::map<std::string, json> rows;
  for (const json& row : results["collectives"]) rows[row["purpose"]] = row;
  ASSERT_TRUE(rows.contains("row_parallel.forward"));
  // 2 layers x 2 sums of [1, 16, 48] in fp32, of 3 micro-batches, on 4 ranks
  EXPECT_EQ(rows["row_parallel.forward"]["calls_per_step_and_rank"], 12.0);
  EXPECT_EQ(rows["row_parallel.forward"]["bytes_per_step_all_ranks"], 12.0 * 4 * 16 * 48 * 4);
}

TEST(BenchCommand, SaysUngatedInEveryLineAndOnlyThen) {
  const TestFolder folder;
  const ChildResult ungated =
      run_bench_in(folder, tiny_bench("ddp", {"--tp_size", "1", "--ungated"}));
  Arguments reference = tiny_bench("reference");
  reference[8] = "1";

  const ChildResult trusted = run_bench_in(folder, reference);

  EXPECT_EQ(ungated.exit_code, 2) << "a flag given twice is refused";
  Arguments ddp = tiny_bench("ddp", {"--ungated"});
  ddp[8] = "1";
  const ChildResult marked = run_bench_in(folder, ddp);
  ASSERT_EQ(marked.exit_code, 0) << marked.error;
  std::istringstream lines(marked.output);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count)
    EXPECT_THAT(line, StartsWith("[ungated]"));
  EXPECT_GT(count, 20);
  EXPECT_EQ(wide_lines(marked.output, {"[ungated] 32 tokens", "[ungated]   - ", "[ungated] gate",
                                       "[ungated] 2 steps", "[ungated] wrote"}),
            "");
  ASSERT_EQ(trusted.exit_code, 0) << trusted.error;
  EXPECT_THAT(trusted.output, Not(HasSubstr("ungated")));
}

TEST(BenchCommand, SaysTheSpeedAloneWhenQuiet) {
  const TestFolder folder;

  const ChildResult result = run_bench_in(folder, tiny_bench("autotp", {"--ungated", "--quiet"}));

  ASSERT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output,
              testing::MatchesRegex("\\[ungated\\] autotp .*: median .* ms a step, .* tokens/s\n"));
}

TEST(BenchCommand, JudgesATwinOnceAndRemembersIt) {
  const TestFolder folder;
  const ChildResult first = run_bench_in(folder, tiny_bench("autotp"));
  const ChildResult second = run_bench_in(folder, tiny_bench("autotp"));
  const ChildResult other = run_bench_in(folder, tiny_bench("autotp", {"--zero_stage", "2"}));

  ASSERT_EQ(first.exit_code, 0) << first.output << first.error;
  EXPECT_THAT(first.output, HasSubstr("conforms (exact)"));
  EXPECT_THAT(second.output, HasSubstr("conformed (exact) with this program and CPU"));
  EXPECT_THAT(other.output, HasSubstr("conforms (exact)")) << "other settings are judged anew";
}

TEST(BenchCommand, EndsWithTheBytesAndACommandThatFitsWhereMemoryDoesNot) {
  const TestFolder folder;

  const ChildResult result = run_bench_in(folder, {"bench", "--dp_size", "16"});

  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.error, AllOf(HasSubstr("autotp of Qwen/Qwen3-32B needs"), HasSubstr("bytes"),
                                  HasSubstr("GiB")));
  const std::string words = "this fits: isoshard bench ";
  const std::size_t command = result.error.find(words);
  ASSERT_NE(command, std::string::npos) << result.error;
  std::istringstream stream(result.error.substr(command + words.size()));
  Arguments flags;
  for (std::string flag; stream >> flag;) flags.push_back(flag);
  const Case fitting = bench_plan_of(parse_bench_flags(flags)).item;
  EXPECT_LT(predicted_bytes_of_world(fitting),
            static_cast<double>(memory_of_machine().available_bytes));
  EXPECT_FALSE(fs::exists(folder.path() / "results"));
}

TEST(BenchCommand, RefusesWhatTheToolHasAndACpuHasNot) {
  const TestFolder folder;

  const ChildResult flash =
      run_bench_in(folder, {"bench", "--model", "tiny", "--attn_impl", "flash_attention_2"});
  const ChildResult heads =
      run_bench_in(folder, {"bench", "--model", "tiny", "--tp_size", "4", "--nproc-per-node", "4"});
  const ChildResult world =
      run_bench_in(folder, {"bench", "--model", "tiny", "--tp_size", "2", "--nproc-per-node", "8"});

  EXPECT_EQ(flash.exit_code, 2);
  EXPECT_THAT(flash.error, HasSubstr("flash_attention_2"));
  EXPECT_EQ(heads.exit_code, 2);
  EXPECT_THAT(heads.error, HasSubstr("4"));
  EXPECT_EQ(world.exit_code, 2);
  EXPECT_THAT(world.error, HasSubstr("dp_size x tp_size must be the number of processes"));
}

TEST(BenchCommand, RefusesToBeStartedByMpirunWithoutAttachAndSaysWhatToDo) {
  const TestFolder folder;

  const ChildResult result = malformed::run_isoshard(
      folder.path(), tiny_bench("ddp"), [] { ::setenv("OMPI_COMM_WORLD_SIZE", "2", 1); });

  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.error, HasSubstr("add --attach, or start one process"));
}

Arguments tiny_compare(Arguments sides) {
  Arguments all = {"bench", "compare"};
  all.insert(all.end(), sides.begin(), sides.end());
  all.insert(all.end(),
             {"--model", "tiny", "--seq_length", "16", "--dtype", "float32", "--dp", "2",
              "--num_training_steps", "3", "--warmup_steps", "1", "--pairs", "3", "--ungated"});
  return all;
}

TEST(BenchCommand, ComparesInPairsAndSaysHowSureItIs) {
  const TestFolder folder;

  const ChildResult result =
      run_bench_in(folder, tiny_compare({"impl=autotp zero-stage=0", "impl=ddp"}));

  ASSERT_EQ(result.exit_code, 0) << result.output << result.error;
  EXPECT_THAT(result.output, AllOf(HasSubstr("A: autotp"), HasSubstr("B: ddp"),
                                   HasSubstr("time of B / time of A"), HasSubstr("95 % interval")));
  const json compared = read_results(folder.path() / "results/compare.json");
  EXPECT_EQ(compared["seconds_per_token_a"].size(), 3U);
  EXPECT_LE(compared["b_over_a"]["low"], compared["b_over_a"]["ratio"]);
  EXPECT_EQ(compared["a"]["zero_stage"], 0);
}

// What was stored is edited: a hundred times faster than now, or slower, or of a faster machine.
TEST(BenchRegression, IsToldFromASlowerMachineAndFromNone) {
  const TestFolder folder;
  Arguments store = {
      "bench", "--impl",         "ddp", "--model",  "tiny",    "--seq_length",
      "16",    "--dp",           "2",   "--dtype",  "float32", "--num_training_steps",
      "3",     "--warmup_steps", "1",   "--repeat", "3",       "--ungated"};
  ASSERT_EQ(run_bench_in(folder, store).exit_code, 0);
  const fs::path stored = folder.path() / "results/results_ddp_tp1_dp2.json";
  const auto compared = [&](double times, double ceiling) {
    json edited = read_results(stored);
    for (json& run : edited["runs"])
      run["p50_step_time_ms"] = times * run["p50_step_time_ms"].get<double>();
    edited["machine"]["gemm_ceiling_flops_per_sec"] = ceiling;
    std::ofstream(folder.path() / "stored.json") << edited.dump();
    return run_bench_in(folder, {"bench", "compare", "stored.json", "--pairs", "3", "--ungated"});
  };

  const ChildResult slower = compared(1e-4, 1), machine = compared(1e-4, 1e30),
                    faster = compared(1e4, 1);

  EXPECT_EQ(slower.exit_code, 1) << slower.output << slower.error;
  EXPECT_THAT(slower.output, HasSubstr("REGRESSION"));
  EXPECT_EQ(machine.exit_code, 4) << machine.output << machine.error;
  EXPECT_THAT(machine.output, HasSubstr("the machine itself is slower than then"));
  EXPECT_EQ(faster.exit_code, 0) << faster.output << faster.error;
}

TEST(BenchRegression, NeedsRunsOfThisMachine) {
  const TestFolder folder;
  std::ofstream(folder.path() / "other.json") << R"({"steps": []})";

  const ChildResult other = run_bench_in(folder, {"bench", "compare", "other.json"});

  EXPECT_EQ(other.exit_code, 3);
  EXPECT_THAT(other.error, HasSubstr("must be a result of isoshard bench"));
}

BenchPlan plan_of_flags(const Arguments& flags) {
  return bench_plan_of(parse_bench_flags(flags));
}

TEST(BenchFlags, HaveTheDefaultsOfTheTool) {
  const ParsedOptions options = parse_bench_flags({});
  const BenchPlan plan = plan_of_flags({"--model", "tiny", "--seq_length", "512"});
  const Case& item = plan.item;

  EXPECT_EQ(options.get<std::string>("model"), "Qwen/Qwen3-32B");
  EXPECT_EQ(options.get<std::string>("tp"), "auto");
  EXPECT_EQ(plan.impl, "autotp");
  EXPECT_EQ(item.attention, AttentionImpl::kSdpa);
  EXPECT_EQ(item.dtype, Dtype::kBFloat16);
  EXPECT_EQ(item.batch_size, 1);
  EXPECT_EQ(item.steps, 100);
  EXPECT_EQ(item.micro_batches, 1);
  EXPECT_EQ(item.seed, 42U);
  EXPECT_EQ(item.settings.optimizer.kind, OptimizerSettings::Kind::kAdamW);
  EXPECT_EQ(item.settings.optimizer.learning_rate, 1e-5);
  EXPECT_EQ(item.settings.optimizer.weight_decay, 0.01);
  EXPECT_EQ(item.settings.max_grad_norm, 1.0);
  EXPECT_EQ(item.settings.zero_stage, 1);
  EXPECT_EQ(item.settings.make_vocab_size_divisible_by, 1);
  EXPECT_EQ(item.settings.recompute_every, 0);
  EXPECT_EQ(plan.warmup_steps, 5);
  EXPECT_EQ(plan.log_interval, 10);
  EXPECT_EQ(plan.output_dir, "./results");
  EXPECT_TRUE(plan.is_gated);
}

TEST(BenchFlags, OfTheToolMeanWhatTheySay) {
  const BenchPlan plan = plan_of_flags({"--impl",
                                        "autotp",
                                        "--model_name",
                                        "tiny",
                                        "--num_layers",
                                        "1",
                                        "--attn_impl",
                                        "eager",
                                        "--nproc_per_node",
                                        "6",
                                        "--dp_size",
                                        "2",
                                        "--zero_stage",
                                        "2",
                                        "--no_vocab_parallel",
                                        "--batch_size",
                                        "3",
                                        "--seq_length",
                                        "32",
                                        "--num_training_steps",
                                        "7",
                                        "--learning_rate",
                                        "2e-5",
                                        "--weight_decay",
                                        "0.1",
                                        "--gradient_accumulation_steps",
                                        "2",
                                        "--max_grad_norm",
                                        "0.5",
                                        "--dtype",
                                        "bfloat16",
                                        "--autocast",
                                        "--activation_checkpointing",
                                        "--warmup_steps",
                                        "2",
                                        "--log_interval",
                                        "3",
                                        "--output_dir",
                                        "out",
                                        "--seed",
                                        "7"});
  const Case& item = plan.item;

  EXPECT_EQ(item.degrees.tp, 3) << "auto: 6 processes / dp 2";
  EXPECT_EQ(item.config.num_layers, 1);
  EXPECT_EQ(item.attention, AttentionImpl::kEager);
  EXPECT_EQ(item.settings.zero_stage, 2);
  EXPECT_EQ(item.settings.make_vocab_size_divisible_by, 0);
  EXPECT_EQ(item.batch_size, 3);
  EXPECT_EQ(item.steps, 7);
  EXPECT_EQ(item.micro_batches, 2);
  EXPECT_EQ(item.settings.max_grad_norm, 0.5);
  EXPECT_EQ(item.dtype, Dtype::kFloat32);
  EXPECT_EQ(item.settings.autocast, Dtype::kBFloat16);
  EXPECT_EQ(item.settings.recompute_every, 1);
  EXPECT_EQ(item.settings.schedule.warmup_steps, 0) << "the rate has no warm-up";
  EXPECT_EQ(plan.warmup_steps, 2);
  EXPECT_EQ(results_file_name(plan), "results_autotp_tp3_dp2.json");
  const BenchPlan again = plan_of_flags(plan.arguments);
  EXPECT_EQ(again.item.slug(), item.slug());
  EXPECT_EQ(again.item.reference_slug(), item.reference_slug());
}

TEST(BenchFlags, NameEveryImplementation) {
  for (const std::string& impl : bench_impls()) {
    const BenchPlan plan = plan_of_flags({"--model", "tiny", "--seq_length", "16", "--impl", impl});
    EXPECT_EQ(plan.impl, impl);
    EXPECT_EQ(plan.item.subject, impl == "fsdp_dtensor" ? "fsdp_tp" : impl);
  }
  const BenchPlan pipeline = plan_of_flags({"--model", "tiny", "--seq_length", "16", "--impl", "nd",
                                            "--pp", "2", "--nproc-per-node", "4"});
  EXPECT_EQ(pipeline.item.degrees.tp, 2);
  EXPECT_EQ(pipeline.item.micro_batches, 2) << "a micro-batch for each stage";
  EXPECT_EQ(results_file_name(pipeline), "results_nd_tp2_dp1_pp2.json");
  EXPECT_EQ(plan_of_flags(
                {"--model", "tiny", "--seq_length", "16", "--impl", "ddp", "--nproc-per-node", "3"})
                .item.degrees.dp,
            3);
}

}  // namespace
}  // namespace isoshard
