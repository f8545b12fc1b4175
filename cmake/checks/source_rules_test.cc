// SPDX-License-Identifier: Apache-2.0
// The tree keeps the rules of source_rules.h, and each rule finds a violation that is planted in a
// copy made for it.
#include "cmake/checks/source_rules.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>

namespace isoshard {
namespace {
namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const fs::path kRoot = ISOSHARD_SOURCE_DIR;
const fs::path kBuild = ISOSHARD_BINARY_DIR;

/// A small tree in the build folder, removed at the end of the test.
class PlantedTree : public ::testing::Test {
 protected:
  PlantedTree()
      : root_(kBuild / "planted" /
              fmt::format("{}.{}", ::testing::UnitTest::GetInstance()->current_test_info()->name(),
                          getpid())) {
    fs::remove_all(root_);
    plant("src/core/base/error.h", "");
    plant("src/core/comm/communicator.h", "#include \"core/base/error.h\"\n");
    plant("harness/world/rank.h", "#include \"core/comm/communicator.h\"\n");
  }
  ~PlantedTree() override { fs::remove_all(root_); }

  void plant(const fs::path& file, const std::string& text,
             const std::string& first_line = "// SPDX-License-Identifier: Apache-2.0") const {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << first_line << '\n' << text;
  }

  const fs::path root_;
  const std::vector<LayerRow> rows_ = {{"src/core/base", {}},
                                       {"src/core/comm", {"src/core/base"}},
                                       {"harness", {"src/core/base", "src/core/comm"}}};
};

using Layering = PlantedTree;
using FolderCycles = PlantedTree;
using FolderSizes = PlantedTree;
using JudgeWithoutLibTorch = PlantedTree;
using LineLengths = PlantedTree;
using TimeLimits = PlantedTree;
using SubjectNames = PlantedTree;
using DegreePairs = PlantedTree;
using RecordNameLiterals = PlantedTree;
using Sentences = PlantedTree;
using LicenceLines = PlantedTree;
using DeviceLiterals = PlantedTree;
using OrphanTests = PlantedTree;
using ContractsPage = PlantedTree;

TEST_F(Layering, TreeFollowsDocsLayers) {
  EXPECT_THAT(check_layering(kRoot, read_layers(kRoot / "docs/internals/layers.md")), IsEmpty());
}

TEST_F(Layering, HarnessAndSubjectsDoNotKnowEachOther) {
  int rooms = 0;
  for (const LayerRow& row : read_layers(kRoot / "docs/internals/layers.md")) {
    const bool is_harness = row.folder.starts_with("harness"),
               is_subject = row.folder.starts_with("src/subjects");
    if (!is_harness && !is_subject) continue;
    ++rooms;
    for (const std::string& entry : row.may_include) {
      EXPECT_TRUE(entry.starts_with("src/core") ||
                  entry.starts_with(is_harness ? "harness" : "src/subjects"))
          << row.folder << " may include " << entry;
    }
  }
  EXPECT_GT(rooms, 20);
}

TEST_F(Layering, EveryFolderOfCodeHasItsRow) {
  const std::vector<LayerRow> rows = read_layers(kRoot / "docs/internals/layers.md");
  for (const char* const room : {"src/core", "src/subjects", "harness", "fixtures", "suite"}) {
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / room)) {
      const fs::path folder = entry.path().parent_path().lexically_relative(kRoot);
      if (entry.path().extension() != ".h") continue;
      EXPECT_TRUE(std::ranges::any_of(
          rows, [&](const LayerRow& row) { return row.folder == folder.generic_string(); }))
          << folder << " has no row of its own in docs/internals/layers.md";
    }
  }
}

TEST_F(FolderCycles, TreeHasNone) {
  EXPECT_THAT(check_folder_cycles(kRoot), IsEmpty());
}

TEST_F(FolderCycles, ACycleOverThreeFoldersIsFoundAndTestsAreApart) {
  plant("src/core/base/fine_test.cc", "#include \"harness/world/rank.h\"\n");
  EXPECT_THAT(check_folder_cycles(root_), IsEmpty());

  plant("src/core/base/wrong.cc", "#include \"harness/world/rank.h\"\n");
  EXPECT_THAT(
      check_folder_cycles(root_),
      ElementsAre(HasSubstr("harness/world -> src/core/comm -> src/core/base -> harness/world")));
}

TEST_F(FolderSizes, TreeKeepsThem) {
  EXPECT_THAT(check_folder_sizes(kRoot), IsEmpty());
}

TEST_F(FolderSizes, ATwentySixthFileIsFoundAndTestsAreApart) {
  for (int i = 0; i < 24; ++i) plant(fmt::format("src/core/comm/part{}.cc", i), "");
  plant("src/core/comm/fine_test.cc", "");
  EXPECT_THAT(check_folder_sizes(root_), IsEmpty());

  plant("src/core/comm/one_more.h", "");
  EXPECT_THAT(check_folder_sizes(root_), ElementsAre(HasSubstr("src/core/comm: 26 source files")));
}

TEST_F(JudgeWithoutLibTorch, TreeKeepsItSo) {
  EXPECT_THAT(check_judge_without_libtorch(kRoot), IsEmpty());
}

TEST_F(JudgeWithoutLibTorch, AnIncludeIsFoundDirectlyAndThroughHeaders) {
  plant("src/core/tensor/convert.h", "#include <c10/core/ScalarType.h>\n");
  plant("src/core/comm/tensor.h", "#include \"core/tensor/convert.h\"\n");
  plant("harness/trace/fine_test.cc", "#include <ATen/ATen.h>\n");
  plant("harness/recorder/fine.cc", "#include <ATen/ATen.h>\n");
  EXPECT_THAT(check_judge_without_libtorch(root_), IsEmpty());

  plant("harness/causes/wrong.cc", "#include <ATen/ATen.h>\n");
  plant("harness/stats/wrong.h", "#include <torch/torch.h>\n");
  plant("harness/trace/wrong.cc", "#include <vector>\n#include \"core/comm/tensor.h\"\n");
  EXPECT_THAT(
      check_judge_without_libtorch(root_),
      ElementsAre(HasSubstr("harness/causes/wrong.cc:2: the judge must need no LibTorch"),
                  HasSubstr("harness/stats/wrong.h:2"),
                  HasSubstr("harness/trace/wrong.cc:3: the judge must need no LibTorch, but this "
                            "includes src/core/comm/tensor.h -> src/core/tensor/convert.h -> "
                            "<c10/core/ScalarType.h>")));
}

TEST_F(LineLengths, TreeKeepsThem) {
  EXPECT_THAT(check_line_lengths(kRoot), IsEmpty());
}

TEST_F(LineLengths, ALineOf101ColumnsIsFound) {
  plant("src/core/comm/fine.cc",
        std::string(100, 'x') + "\n" + "\xc3\xa4" + std::string(99, 'x') + "\n");
  EXPECT_THAT(check_line_lengths(root_), IsEmpty());

  plant("src/core/comm/CMakeLists.txt", std::string(101, 'x') + "\n");
  EXPECT_THAT(check_line_lengths(root_),
              ElementsAre(HasSubstr("src/core/comm/CMakeLists.txt:2: 101 columns")));
}

TEST_F(LineLengths, OfTablesArePlainUnlessAProgramWroteThem) {
  const std::string row = std::string(101, '0') + "\n";
  plant("src/core/comm/made.inc", "// Generated by tools/make_table.py: do not edit.\n" + row);
  EXPECT_THAT(check_line_lengths(root_), IsEmpty());

  plant("src/core/comm/written.inc", row);
  EXPECT_THAT(check_line_lengths(root_),
              ElementsAre(HasSubstr("src/core/comm/written.inc:2: 101 columns")));
}

TEST_F(TimeLimits, TreeKeepsThem) {
  EXPECT_THAT(check_time_limits(kRoot), IsEmpty());
}

TEST_F(TimeLimits, AShortOneIsFound) {
  plant("src/core/comm/CMakeLists.txt", "  LABELS unit TIMEOUT 600)\n  LABELS unit TIMEOUT 599)\n");
  plant("cmake/IsoshardTargets.cmake", "# a TIMEOUT (default 120 s)\n");

  EXPECT_THAT(check_time_limits(root_), ElementsAre(HasSubstr("src/core/comm/CMakeLists.txt:3: ")));
}

TEST_F(Layering, CleanTreePasses) {
  EXPECT_THAT(check_layering(root_, rows_), IsEmpty());
}

TEST_F(Layering, UpwardIncludeIsFound) {
  plant("src/core/comm/wrong.cc", "#include \"harness/world/rank.h\"\n");

  EXPECT_THAT(
      check_layering(root_, rows_),
      ElementsAre(HasSubstr("src/core/comm/wrong.cc:2: src/core/comm must not include harness")));
}

TEST_F(Layering, FolderThatOnlySharesAPrefixIsNotAllowed) {
  plant("src/core/base_more/more.h", "");
  plant("src/core/comm/wrong.cc", "#include \"core/base_more/more.h\"\n");

  EXPECT_THAT(check_layering(root_, rows_),
              ElementsAre(HasSubstr("src/core/base_more/more.h:1: its folder is in no row"),
                          HasSubstr("src/core/comm/wrong.cc:2: src/core/comm must not include")));
}

TEST_F(Layering, UnknownIncludeIsFound) {
  plant("src/core/comm/wrong.cc", "#include \"fmt/format.h\"\n");

  EXPECT_THAT(check_layering(root_, rows_), ElementsAre(HasSubstr("is no file of the repository")));
}

TEST_F(Layering, GoogleTestIsAllowedInUnitTestsOnly) {
  plant("src/core/comm/fine_test.cc", "#include <gtest/gtest.h>\n");
  plant("src/core/comm/wrong.cc", "#include <gmock/gmock.h>\n");

  EXPECT_THAT(check_layering(root_, rows_),
              ElementsAre(HasSubstr("src/core/comm/wrong.cc:2: GoogleTest")));
}

TEST_F(Layering, EmptyTreeOrTableIsAnError) {
  plant("docs/internals/layers.md", "no table here\n");

  EXPECT_THROW((void)check_layering(root_ / "nothing", rows_), std::runtime_error);
  EXPECT_THROW((void)read_layers(root_ / "docs/internals/layers.md"), std::runtime_error);
}

TEST_F(SubjectNames, TreeComparesWithNone) {
  EXPECT_THAT(check_subject_names(kRoot), IsEmpty());
}

TEST_F(SubjectNames, AComparisonOutsideTheRegistryIsFoundAndTestsAreApart) {
  EXPECT_THROW((void)check_subject_names(root_), std::runtime_error);
  plant("src/subjects/registry/mine.cc", "{.name = \"mine\"};\nif (name == \"mine\") {}\n");
  plant("harness/world/fine_test.cc", "if (item.subject == \"mine\") {}\n");
  plant("harness/world/fine.cc", "item.subject = \"mine\";\nx == \"mining\";  // == \"mine\"\n");
  EXPECT_THAT(check_subject_names(root_), IsEmpty());

  plant("harness/world/wrong.cc", "if (item.subject != \"mine\") {}\nif (\"mine\" == s) {}\n");
  EXPECT_THAT(check_subject_names(root_),
              ElementsAre(HasSubstr("harness/world/wrong.cc:2: comparison with a subject's name"),
                          HasSubstr("harness/world/wrong.cc:3")));
}

TEST_F(DegreePairs, TreeHasNone) {
  EXPECT_THAT(check_degree_pairs(kRoot), IsEmpty());
}

TEST_F(DegreePairs, EachWayToWriteAPairIsFoundOnce) {
  plant("src/core/comm/fine.cc",
        "void f(int dp, int dp_rank);\nfor (int tp = 0; tp < 2; ++tp) {}\n");
  EXPECT_THAT(check_degree_pairs(root_), IsEmpty());

  plant("src/core/comm/wrong.cc",
        "void f(int dp"
        ", int tp);\nstruct M { int tp"
        ", dp; };\nvoid g(int dp,\n       int cp);\n");
  EXPECT_THAT(check_degree_pairs(root_),
              ElementsAre(HasSubstr("src/core/comm/wrong.cc:2"), HasSubstr("wrong.cc:3"),
                          HasSubstr("wrong.cc:4")));
}

TEST_F(RecordNameLiterals, TreeHasThemInTheParserOnly) {
  EXPECT_THAT(check_record_names(kRoot), IsEmpty());
}

TEST_F(RecordNameLiterals, SuffixesAndScalarsAreFound) {
  plant("src/core/observe/record_name.cc", "Word{NameRole::kSummand, \".partial\"};\n");
  plant("src/subjects/optim/fine.cc", "state.find(name + \".exp_avg\");\n");
  plant("harness/judge/fine_test.cc", "name + \".read\";\n");
  plant("harness/judge/fine.cc",
        "f(\"model.norm.weight.read\"); // \".read\"\njson.read(\"loss\");\n");
  EXPECT_THAT(check_record_names(root_), IsEmpty());

  plant("harness/judge/wrong.cc",
        "name.ends_with(\".partial\");\n\nfmt::format(\"{}.master\", name);\n"
        "RecordKey{step, RecordKind::kScalar, \"grad_norm\", 0};\nname + \".exp_avg_sq\";\n");
  EXPECT_THAT(
      check_record_names(root_),
      ElementsAre(HasSubstr("harness/judge/wrong.cc:2: a part of a record's name"),
                  HasSubstr("wrong.cc:4"), HasSubstr("wrong.cc:5"), HasSubstr("wrong.cc:6")));
}

TEST_F(Sentences, TreeTakesNoneApart) {
  EXPECT_THAT(check_sentences(kRoot), IsEmpty());
}

TEST_F(Sentences, SearchesAndParsersAreFound) {
  plant("harness/judge/fine.cc",
        "finding.diagnosis += words;  // diagnosis.find(\"scale\")\nwhatever.find(name);\n");
  plant("harness/judge/fine_test.cc", "finding.diagnosis.find(\"scale\");\n");
  EXPECT_THAT(check_sentences(root_), IsEmpty());

  plant("suite/verify/wrong.cc",
        "if (verdict.reason.starts_with(\"first\")) {}\nstd::stod(first.diagnosis.c_str() + 6);\n"
        "std::regex_search(finding.what, match, kNumber);\ncause.text.substr(6);\n");
  EXPECT_THAT(
      check_sentences(root_),
      ElementsAre(HasSubstr("suite/verify/wrong.cc:2: reads a sentence"), HasSubstr("wrong.cc:3"),
                  HasSubstr("wrong.cc:4"), HasSubstr("wrong.cc:5")));
}

TEST_F(LicenceLines, TreeHasThem) {
  EXPECT_THAT(check_licence_lines(kRoot), IsEmpty());
}

TEST_F(LicenceLines, MissingLineIsFound) {
  plant("src/core/comm/wrong.cc", "// SPDX-License-Identifier: MIT\n", "// A file.");
  plant("src/core/comm/CMakeLists.txt", "#\n#\n# SPDX-License-Identifier: Apache-2.0\n",
        "# too late");

  EXPECT_THAT(check_licence_lines(root_), ElementsAre(HasSubstr("src/core/comm/CMakeLists.txt:1"),
                                                      HasSubstr("src/core/comm/wrong.cc:1")));
}

TEST_F(DeviceLiterals, TreeHasNone) {
  EXPECT_THAT(check_device_literals(kRoot), IsEmpty());
}

TEST_F(DeviceLiterals, EachKindIsFoundOutsideCommentsAndTests) {
  plant("src/subjects/optim/wrong.cc",
        "x.to(at::kCUDA);\nat::Device(\"cuda:0\");\ny = x.cpu();\n// kCPU in a "
        "comment\nkCPUCount;\n");
  plant("src/subjects/optim/fine_test.cc", "x.to(at::kCUDA);\n");

  EXPECT_THAT(check_device_literals(root_),
              ElementsAre(HasSubstr("src/subjects/optim/wrong.cc:2: device literal kCUDA"),
                          HasSubstr("wrong.cc:3"), HasSubstr("wrong.cc:4")));
}

TEST_F(OrphanTests, TreeHasNone) {
  EXPECT_THAT(check_orphan_tests(kRoot, kBuild / "compile_commands.json"), IsEmpty());
}

TEST_F(OrphanTests, TestInNoTargetIsFound) {
  plant("src/core/comm/known_test.cc", "");
  plant("src/core/comm/forgotten_test.cc", "");
  std::ofstream(root_ / "compile_commands.json") << fmt::format(
      R"([{{"directory": "{0}", "file": "{0}/src/core/comm/known_test.cc"}}])", root_.string());

  EXPECT_THAT(check_orphan_tests(root_, root_ / "compile_commands.json"),
              ElementsAre(HasSubstr("src/core/comm/forgotten_test.cc:1")));
}

TEST_F(ContractsPage, NamesTestsAndFaultsThatExist) {
  EXPECT_THAT(check_contracts_page(kRoot), IsEmpty());
}

TEST_F(ContractsPage, UnknownNamesAreFound) {
  plant("src/core/comm/sum_test.cc", "TEST(Sum,\n     IsExact) {}\nTEST_P(SumOfAll, Works) {}\n");
  plant("docs/reference/faults.md", "| `sum_missing` | A: ddp | No sum. |\n");
  plant("docs/reference/contracts.md",
        "| sum | exact | `Sum.IsExact` | `sum_missing` |\n| sum | exact | `Sum.IsExcat` | "
        "`sum_mising` |\n");

  plant("docs/internals/failures.md", "| 1 | `Sum.IsExact` |\n| 2 | `Sum.IsKilled`, `raise` |\n");

  EXPECT_THAT(check_contracts_page(root_),
              ElementsAre(HasSubstr("contracts.md:3: no test or fault is called Sum.IsExcat"),
                          HasSubstr("contracts.md:3: no test or fault is called sum_mising"),
                          HasSubstr("failures.md:3: no test is called Sum.IsKilled")));
}

}  // namespace
}  // namespace isoshard
