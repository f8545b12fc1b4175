// SPDX-License-Identifier: Apache-2.0
// Train configs of torchtitan, key by key.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "app/options/torchtitan_config.h"
#include "core/base/error.h"

namespace isoshard {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;
using testing::StartsWith;
using testing::ThrowsMessage;
using testing::UnorderedElementsAre;

TorchtitanConfig parsed(const std::string& text) {
  return parse_torchtitan_config(text, "x.toml");
}

void refuses(const std::string& text, const std::string& words) {
  EXPECT_THAT([&] { (void)parsed(text); },
              ThrowsMessage<FileError>(testing::AllOf(StartsWith("x.toml: "), HasSubstr(words))))
      << text;
}

TEST(TorchtitanConfig, KeysBecomeOptions) {
  const TorchtitanConfig config = parsed(R"(
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 600
[training]
local_batch_size = 4
seq_len = 8192
max_norm = 1.0
steps = 3000
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"
[parallelism]
data_parallel_shard_degree = 16
)");

  EXPECT_THAT(config.options,
              UnorderedElementsAre(Pair("learning-rate", "0.0003"), Pair("warmup-steps", "600"),
                                   Pair("batch-size", "4"), Pair("seq-length", "8192"),
                                   Pair("max-grad-norm", "1"), Pair("steps", "3000"),
                                   Pair("dtype", "bf16"), Pair("master-dtype", "fp32"),
                                   Pair("reduce-dtype", "fp32"), Pair("dp", "16")));
  EXPECT_THAT(config.unused, IsEmpty());
}

// As the guideline's time wrote them.
TEST(TorchtitanConfig, OlderPlacesAreTaken) {
  const TorchtitanConfig config = parsed(R"(
[training]
batch_size = 4
warmup_steps = 600
tensor_parallel_degree = 2
[experimental]
context_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
)");

  EXPECT_THAT(config.options, Contains(Pair("batch-size", "4")));
  EXPECT_THAT(config.options, Contains(Pair("test",
                                            "tp=2,cp=2,pp=2,vocab-parallel,sequence-parallel,"
                                            "pipeline-schedule="
                                            "Interleaved1F1B,stages-per-rank=2")));
}

TEST(TorchtitanConfig, TechniquesBecomeATestSet) {
  const TorchtitanConfig config = parsed(R"(
[training]
local_batch_size = 8
[parallelism]
data_parallel_shard_degree = 2
data_parallel_replicate_degree = 2
tensor_parallel_degree = 2
disable_loss_parallel = true
pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 2
context_parallel_degree = 2
context_parallel_rotate_method = "alltoall"
[activation_checkpoint]
mode = "full"
)");

  EXPECT_THAT(config.options, Contains(Pair("dp", "4")));
  EXPECT_THAT(config.options, Contains(Pair("test",
                                            "tp=2,cp=2,pp=2,micro-batches=4,context-attention=ring,"
                                            "recompute,dp-replicate=2")));
}

TEST(TorchtitanConfig, SelectiveCheckpointingTakesEveryNthLayer) {
  EXPECT_THAT(parsed("[activation_checkpoint]\nmode = \"selective\"\n").options,
              Contains(Pair("test", "recompute-every=2")));
  EXPECT_THAT(parsed("[activation_checkpoint]\nselective_ac_option = \"3\"\nmode = \"selective\"\n")
                  .options,
              Contains(Pair("test", "recompute-every=3")));
  EXPECT_THAT(parsed("[activation_checkpoint]\nselective_ac_option = \"3\"\n").options, IsEmpty());
}

TEST(TorchtitanConfig, KeysThatCannotMatterAreToldWithWhy) {
  const TorchtitanConfig config = parsed(R"(
[job]
dump_folder = "out"
[profiling]
enable_profiling = true
[training]
dataset = "c4"
compile = false
)");

  EXPECT_THAT(config.options, IsEmpty());
  EXPECT_THAT(config.unused,
              UnorderedElementsAre(HasSubstr("job.dump_folder"),
                                   HasSubstr("profiling.enable_profiling (nothing is profiled)"),
                                   HasSubstr("training.dataset (the samples are those of --data)"),
                                   HasSubstr("training.compile (it is off)")));
}

// The keys of the guideline's base config, llama3_8b.toml, as it was then and as it is now.
TEST(TorchtitanConfig, TheKeysOfTheBaseConfigAreTaken) {
  for (const char* const sections :
       {"[training]\nseed = 2020\nbatch_size = 1\nwarmup_steps = 200\n"
        "data_parallel_replicate_degree = 1\ndata_parallel_shard_degree = -1\n"
        "tensor_parallel_degree = 1\n[experimental]\npipeline_parallel_degree = 1\n"
        "[float8]\nenable_float8_linear = false\n",
        "[training]\nbatch_size = 1\n[lr_scheduler]\nwarmup_steps = 200\n"
        "[parallelism]\ndata_parallel_replicate_degree = 1\ndata_parallel_shard_degree = -1\n"
        "tensor_parallel_degree = 1\npipeline_parallel_degree = 1\n"
        "context_parallel_degree = 1\n[float8]\nfilter_fqns = \"output\"\n"}) {
    const TorchtitanConfig config =
        parsed(std::string(sections) +
               "[job]\ndump_folder = \"x\"\n[metrics]\nlog_freq = 1\n"
               "[model]\nname = \"llama3\"\nflavor = \"8B\"\ntokenizer_path = \"x\"\n"
               "[checkpoint]\nfolder = \"x\"\n"
               "[activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = \"op\"\n");

    EXPECT_THAT(config.options, Contains(Pair("batch-size", "1")));
    EXPECT_THAT(config.options, Contains(Pair("warmup-steps", "200")));
    EXPECT_THAT(config.unused, Contains(HasSubstr("no number depends on it")));
    for (const auto& [name, value] : config.options) EXPECT_NE(name, "test");
  }
}

TEST(TorchtitanConfig, RefusesUnknownKeysWithASuggestion) {
  refuses("[training]\nbach_size = 4", "unknown key 'training.bach_size' (did you mean");
  refuses("[trainning]\nsteps = 4", "unknown key 'trainning.steps'");
  refuses("steps = 4", "'steps' must be in a section");
}

TEST(TorchtitanConfig, RefusesTechniquesThatThisBuildLacks) {
  refuses("[parallelism]\nenable_async_tensor_parallel = true", "as this build has no async TP");
  refuses("[training]\ncompile = true", "as this build has no compilation");
  refuses("[model]\nconverters = [\"float8\"]", "as this build has no converters");
  refuses("[float8]\nenable_float8_linear = true", "as this build has no float8");
  refuses("[activation_checkpoint]\nmode = \"half\"",
          "activation_checkpoint.mode must be one of none, full, selective, got half");
  refuses("[training]\nglobal_batch_size = 64", "no gradient accumulation");
  refuses("[model]\nname = \"llama4\"", "model.name must be one of llama3, got llama4");
}

TEST(TorchtitanConfig, RefusesWrongValues) {
  refuses("[training]\nsteps = \"many\"", "training.steps must be a number, got many");
  refuses("[training]\ncompile = 1", "training.compile must be true or false");
  refuses("[optimizer]\nname = 3", "optimizer.name must be a string");
  refuses("[parallelism]\ntensor_parallel_degree = 0", "must be at least 1, got 0");
  refuses("[parallelism]\ntensor_parallel_degree = 1.5", "must be a whole number, got 1.5");
  refuses("[optimizer]\nbeta1 = 0.8", "optimizer.beta1 must be 0.9");
  refuses("[training]\nbatch_size = 4\nlocal_batch_size = 4", "must not both be there");
  refuses("[training\nsteps = 3", "must be TOML");
  refuses("\xff\xfe", "must be TOML");
  refuses("[training]\nsteps = 1979-05-27", "training.steps must be a number");
  refuses(
      "[training]\nlocal_batch_size = 99999999999\n[parallelism]\n"
      "pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 1",
      "must be a whole number, got 99999999999");
  refuses(
      "[training]\nlocal_batch_size = 8\n[parallelism]\npipeline_parallel_degree = 2\n"
      "pipeline_parallel_microbatch_size = 3",
      "must be a multiple of pipeline_parallel_microbatch_size 3, got 8");
  refuses("[lr_scheduler]\nmin_lr_factor = 0.1", "needs optimizer.lr");
}

}  // namespace
}  // namespace isoshard
