// SPDX-License-Identifier: Apache-2.0
/// Flags, names and sizes that cannot be meant: exit 2, what is wrong and what would be right, and
/// no rank is started.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "app/testing/malformed_rows.h"

namespace isoshard::malformed {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kUsage = 2;

Row usage(std::string name, const std::string& line, std::vector<std::string> words) {
  Arguments arguments;
  std::istringstream stream(line);
  for (std::string word; stream >> word;) arguments.push_back(word);
  return {std::move(name), nullptr, std::move(arguments), kUsage, std::move(words)};
}

class MalformedFlags : public testing::TestWithParam<Row> {};

INSTANTIATE_TEST_SUITE_P(
    Names, MalformedFlags,
    testing::Values(
        usage("Command", "verfy",
              {"unknown command 'verfy' (did you mean 'verify'?)", "isoshard --help"}),
        usage("CommandOfThePythonPackage", "judge -- torchrun train.py",
              {"Python package", "isoshard judge"}),
        usage("Flag", "verify --batch-sise 2",
              {"unknown option '--batch-sise' (did you mean 'batch-size'?)", "--help"}),
        usage("FlagOfAnAlias", "verify --tp_sise 2", {"unknown option '--tp-sise'"}),
        usage("Abbreviation", "verify --batch-siz 2",
              {"unknown option '--batch-siz' (did you mean 'batch-size'?)"}),
        usage("ShortFlag", "verify -x", {"unknown option"}),
        usage("Argument", "verify extra", {"'extra'"}),
        usage("OneArgumentTooMany", "compare a b c", {"'c'"}),
        usage("Model", "verify --model qwen2.5-0.6b",
              {"unknown model 'qwen2.5-0.6b' (did you mean 'Qwen/Qwen2.5-0.5B'?)", "config.json"}),
        usage("ModelOfAnOrganization", "verify --model Qwen/Qwen2.5-0.6B",
              {"did you mean 'Qwen/Qwen2.5-0.5B'?"}),
        usage("Subject", "verify --subjects atotp",
              {"unknown subject 'atotp' (did you mean 'autotp'?)"}),
        usage("Dtype", "verify --dtype fp31", {"unknown dtype 'fp31' (did you mean 'fp32'?)"}),
        usage("DtypeOfAList", "verify --dtype bf16,bf17",
              {"unknown dtype 'bf17' (did you mean 'bf16'?)"}),
        usage("DtypeThatNobodyTrainsIn", "verify --dtype int64",
              {"fp64, fp32, bf16 or fp16, got int64"}),
        usage("Preset", "verify --preset smal", {"unknown preset 'smal' (did you mean 'small'?)"}),
        usage("Optimizer", "verify --optimizer adm",
              {"unknown optimizer 'adm' (did you mean 'adamw'?)"}),
        usage("Attention", "verify --attn-impl eagr", {"(did you mean 'eager'?)"}),
        usage("ReductionOrder", "verify --reduction-order tre",
              {"unknown reduction order 'tre' (did you mean 'tree'?)"}),
        usage("LossMean", "verify --loss-mean globl",
              {"unknown loss mean 'globl' (did you mean 'global'?)"}),
        usage("Reference", "verify --reference emulate",
              {"unknown reference 'emulate' (did you mean 'emulated'?)"}),
        usage("Fault", "verify --fault dp_sum_mising",
              {"unknown fault 'dp_sum_mising' (did you mean 'dp_sum_missing'?)"}),
        usage("Contract", "explain tp.row.bais", {"did you mean 'tp.row.bias'?"}),
        usage("Experiment", "experiment stak",
              {"unknown experiment 'stak' (did you mean 'stack'?)"}),
        usage("List", "list fauls", {"did you mean 'faults'?"}),
        usage("EscapeSequences", "verify --model \x1b[31mred", {"\\x1b[31mred"})),
    [](const auto& row) { return row.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Values, MalformedFlags,
    testing::Values(
        usage("Missing", "verify --tp", {"--tp", "missing"}),
        usage("NoNumber", "verify --tp two", {"'two'", "--tp"}),
        usage("NumberAndMore", "verify --tp 2x", {"'2x'", "--tp"}),
        usage("TooLong", "verify --tp 99999999999", {"'99999999999'", "--tp"}),
        usage("Twice", "verify --tp 2 --tp 3", {"--tp", "more than once"}),
        usage("Zero", "verify --dp 0", {"dp degree must be at least 1, got 0", "at least 1"}),
        usage("WorldOfOne", "verify --preset small --subjects ddp --dp 1",
              {"must run on at least 2 processes, got 1", "--dp 2"}),
        usage("Negative", "verify --tp -1 --dp 1",
              {"tp degree must be at least 1, got -1", "at least 1"}),
        usage("NegativeSeed", "verify --seed -1", {"--seed must be at least 0, got -1"}),
        usage("NaN", "verify --learning-rate nan",
              {"learning rate must be above 0 and finite in fp32, got nan"}),
        usage("NoRuns", "verify --repeat 0", {"--repeat must be from 1 to", "got 0"}),
        usage("TooManyRuns", "verify --repeat 10001", {"from 1 to 10000, got 10001"}),
        usage("Required", "verify --require exakt",
              {"--require must be one of any, exact, got 'exakt' (did you mean 'exact'?)"}),
        usage("NoSuchDevice", "verify --device gpu", {"--device must be cpu or cuda, got gpu"}),
        usage("NoGpu", "verify --preset small --device cuda",
              {"device cuda must be a GPU that this program can use, got none: it was built "
               "without CUDA",
               "--device cpu"}),
        usage("NoGpuToTrainOn", "train --preset small --device cuda",
              {"device cuda must be a GPU", "docs/reference/gpu.md"}),
        usage("NoGpuToCompareOn", "compare a b --device cuda",
              {"device cuda must be a GPU that this program can use, got none: it was built "
               "without CUDA",
               "--device cpu"}),
        usage("NoSuchDeviceToCompareOn", "compare a b --device gpu",
              {"--device must be cpu or cuda, got gpu"}),
        usage("Tf32OnACpu", "verify --preset small --tf32",
              {"--tf32 must be given with --device cuda, got device cpu"}),
        usage("NoSteps", "verify --steps 0", {"number of steps must be at least 1, got 0"}),
        usage("NoLayers", "verify --num-layers -1",
              {"number of layers must be at least 1, got -1"}),
        usage("OneToken", "verify --seq-length 1",
              {"sequence length must be at least 2", "at least 2"}),
        usage("BeyondTheModelsPositions", "verify --preset small --seq-length 513",
              {"513", "at most 512, the model's positions, got 513"}),
        usage("EmptyList", "verify --dtype ,", {"--dtype", "nothing selected"}),
        usage("EmptyListOfSubjects", "verify --subjects ,", {"--subjects", "nothing selected"}),
        usage("NothingSelected", "verify --subjects reference", {"nothing selected"}),
        usage("ProductOverflows", "verify --dp 2 --subjects ddp --batch-size 4611686018427387904",
              {"batch size 4611686018427387904"}),
        usage("MoreMemoryThanThereIs", "verify --dp 2 --subjects ddp --batch-size 10000000",
              {"needs at least", "GiB of memory, the machine has", "of its records of 1 step"})),
    [](const auto& row) { return row.param.name; });

// What would take all memory, or never end.
INSTANTIATE_TEST_SUITE_P(
    Sizes, MalformedFlags,
    testing::Values(
        usage("Layers", "verify --preset small --num-layers 2000000000",
              {"number of layers must be at most 100000, got 2000000000"}),
        usage("LayersThatNoIntegerHolds", "verify --preset small --num-layers 9000000000000000000",
              {"number of layers must be at most 100000, got 9000000000000000000"}),
        usage("LayersOfARunOfManySteps", "train --preset small --num-layers 100001",
              {"number of layers must be at most 100000, got 100001"}),
        usage("LayersThatAreAllowedAndDoNotFit",
              "verify --preset small --subjects ddp --dp 2 --dtype fp32 --num-layers 99999",
              {"needs at least", "GiB of memory, the machine has"}),
        usage("Steps", "verify --preset small --subjects ddp --dp 2 --steps 2000000000",
              {"number of steps must be at most 10000000, got 2000000000"}),
        usage("StepsOfTraining", "train --preset small --steps 1000000000",
              {"number of steps must be at most 10000000, got 1000000000"}),
        usage("StepsThatAreAllowedAndDoNotFit",
              "verify --preset small --subjects ddp --dp 2 --dtype fp32 --steps 10000000",
              {"GiB of memory, the machine has", "of its records of 10000000 steps"}),
        usage("DegreesWhoseProductOverflows",
              "train --preset small --tp 2000000000 --dp 2000000000", {"2000000000"}),
        usage("StepsOfAConvergenceTest", "converge --steps 1000000000",
              {"number of steps must be at most 10000000, got 1000000000"}),
        usage("StagesOfAConvergenceTest",
              "converge --test pp=2000000000,stages-per-rank=2000000000",
              {"rule pipeline-batch", "got a local batch of 4 for 4000000000000000000"}),
        usage("DegreesOfAConvergenceTest", "converge --test tp=2 --dp 2000000000", {"2000000000"}),
        usage("LayersOfAnExperiment", "experiment growth --layers 2000000000",
              {"number of layers must be at most 100000, got 2000000000"}),
        usage("WidthOfAnExperiment", "experiment init --hidden-size 8000000000000000000",
              {"experiment init needs at least", "GiB of memory, the machine has"}),
        usage("SumsOfAnExperiment", "experiment column-row --ffn-size 8000000000000",
              {"experiment column-row needs at least"}),
        usage("SamplesOfAnExperiment", "experiment stack --batch-size 2000000000000",
              {"experiment stack needs at least"}),
        usage("TokensOfAnExperiment", "experiment growth --seq-length 2000000000000",
              {"experiment growth needs at least"})),
    [](const auto& row) { return row.param.name; });

// Row 69 of docs/internals/failures.md: every degree with the number that it does not divide.
INSTANTIATE_TEST_SUITE_P(
    Degrees, MalformedFlags,
    testing::Values(
        usage("Heads", "verify --preset small --tp 4 --dp 1",
              {"tp 4 does not divide the model's 6 attention heads"}),
        usage("KvHeads", "verify --model Qwen/Qwen2.5-0.5B --num-layers 1 --tp 7",
              {"tp 7 does not divide the model's 2 kv heads"}),
        usage("Ffn", "experiment growth --tp 5", {"tp 5 does not divide the ffn size of 512"}),
        usage("Ranks", "verify --preset small --tp 6 --dp 3 --subjects autotp",
              {"dp 3 x tp 6 needs 18 ranks", "16"}),
        usage("NoTpAxis", "verify --subjects ddp --tp 2",
              {"--subjects ddp --tp 2: ddp has no tp axis"}),
        usage("Tail",
              "verify --dp 2 --subjects ddp --data bytes.bin --data-dtype uint8 --tail error",
              {"not a multiple of a global batch of 4"})),
    [](const auto& row) { return row.param.name; });

TEST_P(MalformedFlags, IsRefusedBeforeARankStarts) {
  const TestFolder folder;
  std::ofstream(folder / "bytes.bin") << std::string(843, 'a');
  const auto before = tree_of(folder.path());

  const ChildResult result =
      run_isoshard(folder.path(), GetParam().arguments, refuse_new_processes);

  EXPECT_EQ(result.exit_code, GetParam().exit_code) << result.error;
  EXPECT_THAT(result.error, StartsWith("isoshard: "));
  for (const std::string& word : GetParam().words) EXPECT_THAT(result.error, HasSubstr(word));
  for (const char c : result.error)
    EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20 || c == '\n') << result.error;
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(tree_of(folder.path()), before);
}

// What the rows above rest on: without a bad flag, the same refusal of processes is an error of
// another kind.
TEST(MalformedControl, ARunThatMayStartNoRankIsNotAUsageError) {
  const TestFolder folder;

  const ChildResult result = run_isoshard(
      folder.path(),
      {"verify", "--preset", "small", "--tp", "2", "--subjects", "autotp", "--dtype", "fp32"},
      refuse_new_processes);

  EXPECT_EQ(result.exit_code, 4);
  EXPECT_THAT(result.error + result.output, HasSubstr("cannot start a process for rank 0"));
}

}  // namespace
}  // namespace isoshard::malformed
