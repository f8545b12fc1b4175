// SPDX-License-Identifier: Apache-2.0
// `train`, `plot` and `compare` on loss curves, through the whole program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "app/testing/malformed_rows.h"
#include "core/base/atomic_file.h"
#include "harness/curve/curve.h"
#include "suite/testing/json_schema.h"

namespace isoshard {
namespace {

using malformed::Arguments;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

/// How the whole program ended, and all that it said.
struct Ran {
  int code = -1;
  std::string output;
};
Ran run_isoshard(const std::filesystem::path& folder, const Arguments& arguments,
                 const std::function<void()>& prepare = nullptr) {
  const ChildResult result = malformed::run_isoshard(folder, arguments, prepare);
  return {result.exit_code, result.output + result.error};
}

/// Twelve steps of the fault catalogue's tiny model.
Arguments train(Arguments more, const std::string& folder = "curves") {
  Arguments all = {"train", "--model", "tiny", "--steps", "12", "--output-dir", folder};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

json read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return json::parse(file);
}

Schema schema() {
  return Schema(read(std::filesystem::path(ISOSHARD_DOCS_DIR) / "loss.schema.json"));
}

// Six steps, a checkpoint, six more: of the same mesh the numbers of the uninterrupted run; another
// mesh and subject conforms.
TEST(Train, GoesOnFromACheckpoint) {
  const TestFolder folder;
  const Arguments mesh = {"--subjects", "autotp", "--tp", "2", "--dp", "2"};
  Arguments save = mesh, same = mesh;
  save.insert(save.end(),
              {"--storage-path", "disk", "--save-checkpoint", "saved", "--save-after", "6"});
  same.insert(same.end(), {"--storage-path", "disk", "--resume", "saved/autotp"});
  ASSERT_EQ(run_isoshard(folder.path(), train(save, "whole")).code, 0);

  const Ran resumed = run_isoshard(folder.path(), train(same, "rest"));
  const Ran other = run_isoshard(folder.path(), train({"--subjects", "fsdp_tp", "--tp", "2", "--dp",
                                                       "3", "--resume", "disk/saved/reference"},
                                                      "other"));

  ASSERT_EQ(resumed.code, 0) << resumed.output;
  EXPECT_THAT(resumed.output,
              HasSubstr("The reference was not interrupted: it trained from step 0"));
  const Curve whole = read_curve(folder / "whole/loss_autotp.json"),
              rest = read_curve(folder / "rest/loss_autotp.json");
  ASSERT_EQ(whole.steps.size(), 12U);
  ASSERT_EQ(rest.steps.size(), 6U);
  for (std::size_t i = 0; i < rest.steps.size(); ++i) {
    EXPECT_EQ(rest.steps[i].step, whole.steps[i + 6].step);
    EXPECT_EQ(rest.steps[i].loss, whole.steps[i + 6].loss);
    EXPECT_EQ(rest.steps[i].grad_norm, whole.steps[i + 6].grad_norm);
  }
  EXPECT_EQ(other.code, 0) << other.output;
  EXPECT_THAT(other.output,
              AllOf(HasSubstr("WARNING: the reference goes on from the checkpoint, too"),
                    HasSubstr("data.dp: reference 2, actual 3")));
}

TEST(Train, RefusesACheckpointThatItCannotGoOnFrom) {
  const TestFolder folder;
  ASSERT_EQ(run_isoshard(folder.path(), train({"--subjects", "ddp", "--reference", "none",
                                               "--save-checkpoint", "saved"}))
                .code,
            0);

  const Ran done =
      run_isoshard(folder.path(), train({"--subjects", "ddp", "--resume", "saved/ddp"}));
  const Ran sgd = run_isoshard(
      folder.path(), train({"--subjects", "ddp", "--resume", "saved/ddp", "--optimizer", "sgd"}));
  const Ran nowhere =
      run_isoshard(folder.path(), train({"--subjects", "ddp", "--resume", "nowhere"}));

  EXPECT_EQ(done.code, 2);
  EXPECT_THAT(done.output, HasSubstr("--steps must be above 12"));
  EXPECT_EQ(sgd.code, 3);
  EXPECT_THAT(sgd.output, HasSubstr("sgd with momentum"));
  EXPECT_EQ(nowhere.code, 3);
  EXPECT_THAT(nowhere.output, HasSubstr("nowhere/manifest.json"));
}

TEST(Train, WritesACurveOfEachSubjectAndJudgesIt) {
  const TestFolder folder;

  const Ran result =
      run_isoshard(folder.path(), train({"--subjects", "reference,ddp,autotp", "--tp", "2", "--dp",
                                         "2", "--log-interval", "5", "--verbose"}));

  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("CONFORMS (within tolerance)  copy of PyTorch DDP (TP=1, DP=2): 12 "
                              "steps"),
                    HasSubstr("CONFORMS (within tolerance)  copy of DeepSpeed AutoTP (TP=2, DP=2)"),
                    HasSubstr("Differences from DDP baseline:"), HasSubstr("ddp step 10: loss")));
  const std::vector<Curve> curves = read_curves(folder / "curves");
  ASSERT_THAT(curves, SizeIs(3));
  EXPECT_EQ(curves[0].perturbed_runs, 5);
  EXPECT_THAT(curves[0].spreads, SizeIs(12));
  for (const Curve& curve : curves) {
    const json file = read(folder / "curves" / curve_file_name(curve));
    EXPECT_THAT(schema().problem(file), IsEmpty()) << curve.subject;
    EXPECT_THAT(curve.steps, SizeIs(12));
    EXPECT_EQ(curve.settings, curves[0].settings);
  }
  EXPECT_EQ(curves[1].mesh.at("tp"), 2);
}

TEST(Train, SchemaRefusesWhatIsMissingOrOfAnotherType) {
  Curve curve;
  curve.subject = "ddp";
  curve.mesh = {{"dp", 1}, {"tp", 1}};
  curve.steps = {{0, 1, {1}, 1, 1}};
  const json right = json::parse(curve_text(curve));
  ASSERT_THAT(schema().problem(right), IsEmpty());
  json lacking = right, wrong = right, extra = right;
  lacking["steps"][0].erase("loss_hex");
  wrong["steps"][0]["loss"] = "1";
  extra["steps"][0]["lr"] = 1;

  EXPECT_THAT(schema().problem(lacking), HasSubstr("has no \"loss_hex\""));
  EXPECT_THAT(schema().problem(wrong), HasSubstr("$.steps[0].loss"));
  EXPECT_THAT(schema().problem(extra), HasSubstr("$.steps[0].lr is not allowed"));
}

TEST(Train, FaultDivergesAndSaysHowToLookFurther) {
  const TestFolder folder;

  const Ran result =
      run_isoshard(folder.path(), {"train", "--fault", "dp_sum_missing", "--steps", "6"});

  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("DIVERGES  copy of PyTorch DDP (TP=1, DP=3)"),
                    HasSubstr("hold different copies of"),
                    HasSubstr("look further: isoshard verify --subjects ddp --dp 3 --steps 1 "
                              "--fault dp_sum_missing")));
}

TEST(Train, TheCommandToLookFurtherRuns) {
  const TestFolder folder;
  const Ran trained =
      run_isoshard(folder.path(), {"train", "--fault", "dp_sum_missing", "--steps", "2",
                                   "--subjects", "autotp", "--tp", "2", "--dp", "2"});
  const std::size_t at = trained.output.find("isoshard verify ");
  ASSERT_NE(at, std::string::npos) << trained.output;
  std::istringstream line(trained.output.substr(at, trained.output.find('\n', at) - at));
  Arguments words;
  for (std::string word; line >> word;) words.push_back(word);
  words.erase(words.begin());

  const Ran verified = run_isoshard(folder.path(), words);

  EXPECT_EQ(verified.code, 1) << verified.output;
  EXPECT_THAT(verified.output, HasSubstr("DIVERGES"));
}

TEST(Train, StoredReferenceJudgesALaterRun) {
  const TestFolder folder;
  ASSERT_EQ(run_isoshard(folder.path(), train({"--subjects", "reference", "--dp", "2",
                                               "--save-init-weights", "w.safetensors"}))
                .code,
            0);

  const Arguments later = train({"--subjects", "autotp", "--tp", "2", "--dp", "2", "--reference",
                                 "curves/loss_reference.json"});
  const Ran same = run_isoshard(folder.path(), later);
  EXPECT_EQ(same.code, 0) << same.output;
  EXPECT_THAT(same.output, HasSubstr("CONFORMS (within tolerance)  copy of DeepSpeed AutoTP"));

  Arguments from_file = later;
  from_file.insert(from_file.end(), {"--init-weights", "w.safetensors"});
  EXPECT_EQ(run_isoshard(folder.path(), from_file).code, 0)
      << "the same weights, from the file that was saved";

  Arguments other = later;
  other.insert(other.end(), {"--learning-rate", "0.0005"});
  // before any rank starts
  const Ran refused = run_isoshard(folder.path(), other, malformed::refuse_new_processes);
  EXPECT_EQ(refused.code, 2) << refused.output;
  EXPECT_THAT(refused.output, HasSubstr("optimizer.learning_rate: reference 0.001, actual 0.0005"));
}

TEST(Train, AReferenceIsTheCurveOfAReference) {
  const TestFolder folder;
  ASSERT_EQ(run_isoshard(folder.path(), train({"--subjects", "ddp", "--reference", "none"})).code,
            0);

  const Ran refused = run_isoshard(
      folder.path(), train({"--subjects", "autotp", "--reference", "curves/loss_ddp.json"}));

  EXPECT_EQ(refused.code, 3) << refused.output;
  EXPECT_THAT(refused.output, HasSubstr("must be the curve of a reference, got the curve of ddp"));
}

TEST(Train, ChaosIsNoSuccessOfTheReferenceAlone) {
  const TestFolder folder;

  const Ran result =
      run_isoshard(folder.path(), train({"--subjects", "reference", "--optimizer", "sgd",
                                         "--learning-rate", "30", "--max-grad-norm", "0"}));

  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("VACUOUS"));
}

TEST(Train, AFaultThatNeverFiresShowsNothing) {
  const TestFolder folder;

  const Ran result = run_isoshard(
      folder.path(), {"train", "--fault", "dp_sum_missing", "--dp", "1", "--steps", "1"});

  EXPECT_EQ(result.code, 4) << result.output;
  EXPECT_THAT(result.output, HasSubstr("fault dp_sum_missing had no effect on"));
}

TEST(Train, ComparesCopiesAsOftenAsAskedFor) {
  const TestFolder folder;

  const Ran result =
      run_isoshard(folder.path(), {"train", "--fault", "dp_sum_missing", "--steps", "6",
                                   "--check-interval", "2", "--reference", "none"});

  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("hold different copies of"), HasSubstr("(step 1)")));
}

TEST(Train, RatesOutsideTheRangeAreWarnedOf) {
  const TestFolder folder;

  const Ran result =
      run_isoshard(folder.path(), {"train", "--model", "tiny", "--steps", "1", "--subjects", "ddp",
                                   "--learning-rate", "0.002", "--dp", "2"});

  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("WARNING: a learning rate of 0.002 is above 0.001"));
}

TEST(Train, TakesTheFlagsOfThePublishedScripts) {
  const TestFolder folder;

  const Ran result = run_isoshard(folder.path(), {"train",
                                                  "--model_name",
                                                  "tiny",
                                                  "--num_workers",
                                                  "4",
                                                  "--tp_size",
                                                  "2",
                                                  "--dp_size",
                                                  "2",
                                                  "--batch_size",
                                                  "2",
                                                  "--seq_length",
                                                  "16",
                                                  "--num_layers",
                                                  "2",
                                                  "--num_epochs",
                                                  "1",
                                                  "--learning_rate",
                                                  "1e-5",
                                                  "--debug_steps",
                                                  "3",
                                                  "--log_interval",
                                                  "1",
                                                  "--loss_output_dir",
                                                  "curves",
                                                  "--storage_path",
                                                  "x",
                                                  "--init_weights_path",
                                                  "w.safetensors",
                                                  "--save_init_weights",
                                                  "--subjects",
                                                  "deepspeed",
                                                  "--autocast"});

  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_TRUE(std::filesystem::exists(folder / "w.safetensors"));
  const Curve curve = read_curve(folder / "curves" / "loss_autotp.json");
  EXPECT_THAT(curve.steps, SizeIs(3));
  EXPECT_EQ(curve.steps[0].learning_rate, 1e-5);
  const json settings = json::parse(curve.settings);
  EXPECT_EQ(settings.at("optimizer").at("kind"), "adamw");
  EXPECT_EQ(settings.at("autocast"), "bf16");
  EXPECT_THAT(result.output, HasSubstr("--storage-path is not used"));
}

struct Bad {
  const char* name;
  Arguments arguments;
  int code;
  const char* words;
};
class TrainFlags : public testing::TestWithParam<Bad> {};

TEST_P(TrainFlags, AreRefusedBeforeAnyRankStarts) {
  const TestFolder folder;
  Arguments arguments = {"train", "--model", "tiny"};
  arguments.insert(arguments.end(), GetParam().arguments.begin(), GetParam().arguments.end());

  const Ran result = run_isoshard(folder.path(), arguments, malformed::refuse_new_processes);

  EXPECT_EQ(result.code, GetParam().code) << result.output;
  EXPECT_THAT(result.output, HasSubstr(GetParam().words));
}

INSTANTIATE_TEST_SUITE_P(
    , TrainFlags,
    testing::Values(
        Bad{"two_dtypes", {"--dtype", "fp32,bf16"}, 2, "a training run has one dtype"},
        Bad{"twice", {"--subjects", "ddp,ddp"}, 2, "got ddp twice"},
        Bad{"steps", {"--steps", "0"}, 2, "number of steps must be at least 1, got 0"},
        Bad{"unknown", {"--subjects", "dpp"}, 2, "unknown subject 'dpp'"},
        Bad{"workers", {"--num-workers", "3", "--tp", "2", "--dp", "2"}, 2, "has 4 ranks"},
        Bad{"tp_of_ddp", {"--subjects", "ddp", "--tp", "2"}, 2, "has no tp axis"},
        Bad{"no_reference", {"--reference", "absent.json"}, 3, "absent.json"},
        Bad{"no_runs", {"--perturbed-runs", "0"}, 2, "must be from 1 to 100, got 0"},
        Bad{"too_many_runs", {"--perturbed-runs", "101"}, 2, "must be from 1 to 100"},
        Bad{"saved_nowhere", {"--save-after", "3"}, 2, "say where to, with --save-checkpoint"},
        Bad{"interval", {"--check-interval", "0"}, 2, "--check-interval must be at least 1, got 0"},
        Bad{"nothing",
            {"--subjects", "reference", "--reference", "none"},
            2,
            "nothing is left to train"},
        Bad{"endless", {"--data", "random", "--num-epochs", "1"}, 2, "random ids have no end"},
        Bad{"epochs_of_empty_batches",
            {"--num-epochs", "1", "--batch-size", "0"},
            2,
            "batch size must be at least 1, got 0"},
        Bad{"nothing_to_judge",
            {"--subjects", "reference", "--reference", "absent.json"},
            2,
            "nothing is left to train"},
        Bad{"end_of_a_constant_rate", {"--total-steps", "50"}, 2, "a constant rate ends nowhere"},
        Bad{"output_of_one",
            {"--subjects", "ddp,fsdp_tp", "--output-dtype", "bf16"},
            2,
            "only fsdp_tp has an output dtype"},
        Bad{"fault_and_preset",
            {"--fault", "dp_sum_missing", "--preset", "small"},
            2,
            "leave --preset out"}),
    [](const testing::TestParamInfo<Bad>& bad) { return bad.param.name; });

/// DDP without clipping, AutoTP with it: what made the published gap of 0.46.
void train_with_one_sided_clip(const TestFolder& folder) {
  const Arguments common = {"--optimizer", "sgd", "--reference", "none",
                            "--dp",        "2",   "--dtype",     "fp32"};
  Arguments ddp = common, autotp = common;
  ddp.insert(ddp.end(), {"--subjects", "ddp", "--max-grad-norm", "0"});
  autotp.insert(autotp.end(), {"--subjects", "autotp", "--tp", "2", "--max-grad-norm", "0.1"});
  ASSERT_EQ(run_isoshard(folder.path(), train(ddp)).code, 0);
  ASSERT_EQ(run_isoshard(folder.path(), train(autotp)).code, 0);
}

TEST(Plot, RefusesAClipOnOneSideByNameAndShowsTheGapIfAsked) {
  const TestFolder folder;
  train_with_one_sided_clip(folder);

  const Ran refused =
      run_isoshard(folder.path(), {"plot", "--input-dir", "curves", "--output", "curves/loss.svg"});
  EXPECT_EQ(refused.code, 2) << refused.output;
  EXPECT_THAT(refused.output, HasSubstr("max_grad_norm: reference 0.0, actual 0.1"));
  EXPECT_FALSE(std::filesystem::exists(folder / "curves" / "loss.svg"));
  const Ran compared =
      run_isoshard(folder.path(), {"compare", "curves/loss_ddp.json", "curves/loss_autotp.json"});
  EXPECT_EQ(compared.code, 2) << compared.output;

  const Ran shown = run_isoshard(folder.path(), {"plot", "--input_dir", "curves", "--output",
                                                 "curves/loss.svg", "--allow-different-settings"});
  ASSERT_EQ(shown.code, 0) << shown.output;
  const std::size_t at = shown.output.find("Max abs diff:  ");
  ASSERT_NE(at, std::string::npos);
  EXPECT_GT(std::stod(shown.output.substr(at + 15)), 0.01) << "a gap that no rounding makes";
  EXPECT_THAT(content_of(folder / "curves" / "loss.svg"),
              HasSubstr("data-series=\"difference: DeepSpeed AutoTP (TP=2, DP=2)\""));
  const Ran judged = run_isoshard(
      folder.path(),
      {"compare", "curves/loss_ddp.json", "curves/loss_autotp.json", "--allow-different-settings"});
  EXPECT_EQ(judged.code, 1) << judged.output;
  EXPECT_THAT(judged.output, AllOf(HasSubstr("DIVERGES"), HasSubstr("0x1."),
                                   HasSubstr("largest difference of the loss: 0.")));
}

TEST(CompareCurves, OfTwoSubjectsAreVacuousWhereOnlyAReferenceCouldTell) {
  const TestFolder folder;
  ASSERT_EQ(run_isoshard(folder.path(), train({"--subjects", "ddp,autotp", "--dp", "2", "--tp", "2",
                                               "--reference", "none"}))
                .code,
            0);
  const Arguments compare = {"compare", "curves/loss_ddp.json", "curves/loss_autotp.json"};

  const Ran unknown = run_isoshard(folder.path(), compare);
  EXPECT_EQ(unknown.code, 1) << unknown.output;
  EXPECT_THAT(unknown.output,
              AllOf(HasSubstr("VACUOUS"), HasSubstr("no perturbed runs"), HasSubstr("--rtol")));
  Arguments told = compare;
  told.insert(told.end(), {"--rtol", "1e-2"});
  EXPECT_EQ(run_isoshard(folder.path(), told).code, 0);
}

TEST(CompareCurves, OfOtherInitialWeightsAreRefused) {
  const TestFolder folder;
  const Arguments common = {"--dp", "2", "--reference", "none", "--init-weights", "w.safetensors"};
  Arguments ddp = common, autotp = common;
  ddp.insert(ddp.end(), {"--subjects", "ddp", "--save-init-weights"});
  autotp.insert(autotp.end(), {"--subjects", "autotp", "--tp", "2"});
  ASSERT_EQ(run_isoshard(folder.path(), train(ddp)).code, 0);
  ASSERT_EQ(run_isoshard(folder.path(), train(autotp)).code, 0);
  const Arguments compare = {"compare", "curves/loss_ddp.json", "curves/loss_autotp.json", "--rtol",
                             "1e-2"};
  EXPECT_EQ(run_isoshard(folder.path(), compare).code, 0)
      << "drawn, saved and read: the same weights";

  // Of another seed: only the file says so.
  ASSERT_EQ(run_isoshard(folder.path(),
                         train({"--subjects", "ddp", "--dp", "2", "--reference", "none", "--seed",
                                "7", "--save-init-weights", "--init-weights", "w.safetensors"}))
                .code,
            0);
  ASSERT_EQ(run_isoshard(folder.path(), train(autotp)).code, 0);
  ASSERT_EQ(
      run_isoshard(folder.path(), train({"--subjects", "ddp", "--dp", "2", "--reference", "none"}))
          .code,
      0);

  const Ran refused = run_isoshard(folder.path(), compare);
  EXPECT_EQ(refused.code, 2) << refused.output;
  EXPECT_THAT(refused.output, HasSubstr("initial weights differ"));
}

TEST(Plot, WritesAPngBesideTheCurvesUnlessTold) {
  const TestFolder folder;
  ASSERT_EQ(
      run_isoshard(folder.path(), train({"--subjects", "ddp", "--dp", "2", "--reference", "none"}))
          .code,
      0);

  const Ran result = run_isoshard(folder.path(), {"plot", "--input-dir", "curves"});

  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(content_of(folder / "curves" / "loss_curves.png").substr(1, 3), "PNG");
  EXPECT_THAT(result.output, HasSubstr("LOSS CURVE STATISTICS"));
}

TEST(Plot, BadFoldersAndFilesAreRefused) {
  const TestFolder folder;
  std::filesystem::create_directory(folder / "curves");

  EXPECT_EQ(run_isoshard(folder.path(), {"plot"}).code, 2);
  EXPECT_EQ(run_isoshard(folder.path(), {"plot", "--input-dir", "absent"}).code, 3);
  EXPECT_EQ(run_isoshard(folder.path(), {"plot", "--input-dir", "curves"}).code, 3) << "no curves";
  write_file_atomically(folder / "curves" / "loss_ddp.json", "{}");
  const Ran malformed = run_isoshard(folder.path(), {"plot", "--input-dir", "curves"});
  EXPECT_EQ(malformed.code, 3);
  EXPECT_THAT(malformed.output, HasSubstr("loss_ddp.json"));
}

TEST(CompareCurves, JudgesByTheStoredSpreads) {
  const TestFolder folder;
  ASSERT_EQ(
      run_isoshard(folder.path(), train({"--subjects", "autotp", "--tp", "2", "--dp", "2"})).code,
      0);
  const Arguments compare = {"compare", "curves/loss_reference.json", "curves/loss_autotp.json"};
  EXPECT_EQ(run_isoshard(folder.path(), compare).code, 0);

  Curve curve = read_curve(folder / "curves" / "loss_autotp.json");
  curve.steps[7].loss += 1e-3;
  write_curve(folder / "curves" / "loss_autotp.json", curve);
  const Ran moved = run_isoshard(folder.path(), compare);
  EXPECT_EQ(moved.code, 1) << moved.output;
  EXPECT_THAT(moved.output, AllOf(HasSubstr("step 7: loss"), Not(HasSubstr("CONFORMS"))));

  std::filesystem::create_directory(folder / "bundle");
  EXPECT_EQ(run_isoshard(folder.path(), {"compare", "curves/loss_reference.json", "bundle"}).code,
            2)
      << "a curve and a bundle";
}

}  // namespace
}  // namespace isoshard
