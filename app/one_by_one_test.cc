// SPDX-License-Identifier: Apache-2.0
/// Runs made one after the other and compared later get the verdict of one run.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "harness/cli/command.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Words = std::vector<std::string>;

class OneByOne : public ::testing::Test {
 protected:
  OneByOne()
      : folder_(fs::temp_directory_path() / fmt::format("isoshard-one-by-one-{}", getpid())) {
    fs::create_directories(folder_);
  }
  ~OneByOne() override { fs::remove_all(folder_); }

  [[nodiscard]] std::string at(const char* name) const { return (folder_ / name).string(); }

  static int command(Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    const std::array commands = {verify_command(), compare_command()};
    return run_command_line(commands, words);
  }

  /// The cases of report.json in a folder, without what names a run.
  [[nodiscard]] json report(const char* name) const {
    std::ifstream file(folder_ / name / "report.json");
    json cases = json::parse(file).at("cases");
    for (json& item : cases) {
      for (const char* key : {"case", "reference", "fault"}) item.erase(key);
    }
    return cases;
  }

  fs::path folder_;
};

/// Saves, runs again from what was saved, compares; and makes the same run at once.
struct Written {
  const char* name;
  Words settings;
  Words data;     ///< of the runs that make their own inputs
  Words subject;  ///< of the run that is compared
  const char* first = "ddp";
};

class OneByOneRuns : public OneByOne, public ::testing::WithParamInterface<Written> {
 protected:
  void expect_one_verdict(const Written& run);
};
/// In 16 bits, where each verdict needs redrawn runs: under slow.
class OneByOneRunsWide : public OneByOneRuns {};

TEST_P(OneByOneRuns, ComparedLaterGetTheVerdictOfOneRun) {
  expect_one_verdict(GetParam());
}
TEST_P(OneByOneRunsWide, ComparedLaterGetTheVerdictOfOneRun) {
  expect_one_verdict(GetParam());
}

void OneByOneRuns::expect_one_verdict(const Written& run) {
  Words one = run.settings, first = run.settings, second = run.settings;
  for (Words* words : {&one, &first}) words->insert(words->end(), run.data.begin(), run.data.end());
  for (Words* words : {&one, &second})
    words->insert(words->end(), run.subject.begin(), run.subject.end());

  const int verdict = command({"verify", "--reference", "plain", "--output-dir", at("one")}, one);
  const int saved =
      command({"verify", "--subjects", run.first, "--dp", "2", "--output_dir", at("shared"),
               "--save_init_weights", "--save_batch", "--dump", at("runs")},
              first);
  const int separate =
      command({"verify", "--input_dir", at("shared"), "--dump", at("others")}, second);
  // Of the first run the trusted one, of the second the one to judge.
  for (const auto& entry : fs::directory_iterator(folder_ / "runs")) {
    if (!entry.path().filename().string().starts_with("reference_")) fs::remove_all(entry.path());
  }
  for (const auto& entry : fs::directory_iterator(folder_ / "others")) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("reference_") && !name.starts_with("emulated_"))
      fs::rename(entry.path(), folder_ / "runs" / name);
  }
  const int compared = command({"compare", "--input_dir", at("runs"), "--output_dir",
                                at("compared"), "--allow-different-origins"},
                               {});

  EXPECT_EQ(verdict, 0);
  EXPECT_EQ(saved, 0);
  EXPECT_EQ(separate, 0);
  EXPECT_EQ(compared, 0);
  json a = report("one"), b = report("compared");
  // Where the second run's batches come from a file, its sampler and masks stand nowhere.
  const auto is_place = [](const json& tensor) {
    return tensor.at("name") == "next_sample_ids" || tensor.at("name") == "rng_state";
  };
  for (json* cases : {&a, &b}) {
    ASSERT_EQ(cases->size(), 1U);
    json& tensors = cases->at(0).at("tensors");
    tensors.erase(std::remove_if(tensors.begin(), tensors.end(), is_place), tensors.end());
    // A reference that was recorded on its own has no table of the calls of other runs.
    for (const char* const key :
         {"collectives", "compared", "reason", "notes", "not_recorded", "copy_of"})
      cases->at(0).erase(key);
  }
  ASSERT_EQ(a.size(), 1U);
  EXPECT_GT(a[0].at("tensors").size(), 100U);
  EXPECT_EQ(a.dump(1), b.dump(1));
}

INSTANTIATE_TEST_SUITE_P(
    Settings, OneByOneRuns,
    ::testing::Values(Written{"fp32_adamw_two_steps_and_micro_batches",
                              {"--dtype", "fp32", "--optimizer", "adamw", "--steps", "2",
                               "--micro-batches", "2", "--model", "small"},
                              {"--seed", "5"},
                              {"--subjects", "autotp", "--tp", "2", "--dp", "2"}},
                      Written{"fp64_shuffled_text",
                              {"--dtype", "fp64", "--model", "small", "--seq-length", "11"},
                              {"--shuffle", "--tail", "pad", "--seed", "3"},
                              {"--subjects", "autotp", "--tp", "2", "--dp", "2"}},
                      Written{"fp32_random_ids",
                              {"--dtype", "fp32", "--model", "tiny"},
                              {"--data", "random"},
                              {"--subjects", "ddp", "--dp", "2"},
                              "autotp"}),
    [](const auto& of) { return of.param.name; });

INSTANTIATE_TEST_SUITE_P(Settings, OneByOneRunsWide,
                         ::testing::Values(Written{
                             "bf16_adamw_two_steps_and_micro_batches",
                             {"--dtype", "bf16", "--optimizer", "adamw", "--steps", "2",
                              "--micro-batches", "2", "--model", "small"},
                             {"--seed", "5"},
                             {"--subjects", "autotp", "--tp", "2", "--dp", "2"}}),
                         [](const auto& of) { return of.param.name; });

TEST_F(OneByOne, AReloadedRunIsJudgedBehindIt) {
  const Words small = {"--subjects",   "ddp", "--dp",    "2", "--dtype",     "fp32",
                       "--num-layers", "1",   "--steps", "2", "--optimizer", "adamw"};
  const auto reloaded = [&](const char* after, const char* name) {
    return command(
        {"verify", "--preset", "small", "--reload-after", after, "--output-dir", at(name)}, small);
  };
  const auto case_of = [&](const char* name) {
    std::ifstream file(folder_ / name / "report.json");
    return json::parse(file).at("cases").at(0).at("case").get<std::string>();
  };

  EXPECT_EQ(reloaded("1", "right"), 0);
  EXPECT_NE(case_of("right").find("reload1"), std::string::npos) << case_of("right");
  EXPECT_EQ(reloaded("2", "late"), 2) << "no step is left behind it";
  const int wrong = command({"verify", "--fault", "optimizer_state_swapped_on_load",
                             "--reload-after", "1", "--output-dir", at("wrong")},
                            {"--steps", "2"});
  EXPECT_EQ(wrong, 1);
  EXPECT_NE(case_of("wrong").find("reload1"), std::string::npos) << case_of("wrong");
}

TEST_F(OneByOne, AnotherBatchIsNoticed) {
  const Words settings = {"--dtype", "fp32", "--model", "tiny",       "--data",
                          "random",  "--dp", "2",       "--subjects", "ddp"};
  Words other = settings;
  other.insert(other.end(), {"--seed", "1"});
  Words from_file = {"--dtype", "fp32", "--model", "tiny", "--dp", "2", "--subjects", "ddp"};

  EXPECT_EQ(command({"verify", "--dump", at("runs"), "--save-init-weights", at("w.safetensors")},
                    settings),
            0);
  EXPECT_EQ(command({"verify", "--save-batch", at("b.safetensors")}, other), 0);
  EXPECT_EQ(command({"verify", "--init-weights", at("w.safetensors"), "--batch",
                     at("b.safetensors"), "--dump", at("others")},
                    from_file),
            0);
  std::string reference, actual;
  for (const auto& entry : fs::directory_iterator(folder_ / "runs")) {
    if (entry.path().filename().string().starts_with("reference_")) reference = entry.path();
  }
  for (const auto& entry : fs::directory_iterator(folder_ / "others")) {
    if (entry.path().filename().string().starts_with("ddp_") ||
        entry.path().filename().string().starts_with("tiny"))
      actual = entry.path();
  }

  EXPECT_EQ(command({"compare", reference, actual}, {}), 2)
      << "the run alone says that its batch is the same";
  EXPECT_EQ(command({"compare", reference, actual, "--output-dir", at("compared"),
                     "--allow-different-origins"},
                    {}),
            1);
  EXPECT_EQ(report("compared").at(0).at("findings").at(0).at("stage"), "data ids");
}

}  // namespace
}  // namespace isoshard
