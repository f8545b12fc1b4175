// SPDX-License-Identifier: Apache-2.0
// The tree keeps the rules of source_rules.h, and each rule finds a violation that is planted in a copy made for it.
#include "cmake/checks/source_rules.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

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
      : root_(kBuild / "planted" / fmt::format("{}.{}", ::testing::UnitTest::GetInstance()->current_test_info()->name(), getpid())) {
    fs::remove_all(root_);
    plant("src/base/error.h", "");
    plant("src/comm/communicator.h", "#include \"base/error.h\"\n");
    plant("harness/world/rank.h", "#include \"comm/communicator.h\"\n");
  }
  ~PlantedTree() override { fs::remove_all(root_); }

  void plant(const fs::path& file, const std::string& text,
             const std::string& first_line = "// SPDX-License-Identifier: Apache-2.0") const {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << first_line << '\n' << text;
  }

  const fs::path root_;
  const std::vector<LayerRow> rows_ = {{"src/base", {}}, {"src/comm", {"src/base"}}, {"harness", {"src/base", "src/comm"}}};
};

using Layering = PlantedTree;
using LicenceLines = PlantedTree;
using DeviceLiterals = PlantedTree;
using OrphanTests = PlantedTree;
using ContractsPage = PlantedTree;

TEST_F(Layering, TreeFollowsDocsLayers) {
  EXPECT_THAT(check_layering(kRoot, read_layers(kRoot / "docs/layers.md")), IsEmpty());
}

TEST_F(Layering, DocsLayersGivesHarnessItsFiveFoldersOfSrc) {
  for (const LayerRow& row : read_layers(kRoot / "docs/layers.md")) {
    if (row.folder == "harness") {
      EXPECT_THAT(row.may_include, ElementsAre("src/base", "src/comm", "src/mesh", "src/observe", "src/io"));
    }
  }
}

TEST_F(Layering, CleanTreePasses) {
  EXPECT_THAT(check_layering(root_, rows_), IsEmpty());
}

TEST_F(Layering, UpwardIncludeIsFound) {
  plant("src/comm/wrong.cc", "#include \"harness/world/rank.h\"\n");

  EXPECT_THAT(check_layering(root_, rows_), ElementsAre(HasSubstr("src/comm/wrong.cc:2: src/comm must not include harness")));
}

TEST_F(Layering, FolderThatOnlySharesAPrefixIsNotAllowed) {
  plant("src/base_more/more.h", "");
  plant("src/comm/wrong.cc", "#include \"base_more/more.h\"\n");

  EXPECT_THAT(check_layering(root_, rows_), ElementsAre(HasSubstr("src/base_more/more.h:1: its folder is in no row"),
                                                        HasSubstr("src/comm/wrong.cc:2: src/comm must not include")));
}

TEST_F(Layering, UnknownIncludeIsFound) {
  plant("src/comm/wrong.cc", "#include \"fmt/format.h\"\n");

  EXPECT_THAT(check_layering(root_, rows_), ElementsAre(HasSubstr("is no file of the repository")));
}

TEST_F(Layering, GoogleTestIsAllowedInUnitTestsOnly) {
  plant("src/comm/fine_test.cc", "#include <gtest/gtest.h>\n");
  plant("src/comm/wrong.cc", "#include <gmock/gmock.h>\n");

  EXPECT_THAT(check_layering(root_, rows_), ElementsAre(HasSubstr("src/comm/wrong.cc:2: GoogleTest")));
}

TEST_F(Layering, EmptyTreeOrTableIsAnError) {
  plant("docs/layers.md", "no table here\n");

  EXPECT_THROW((void)check_layering(root_ / "nothing", rows_), std::runtime_error);
  EXPECT_THROW((void)read_layers(root_ / "docs/layers.md"), std::runtime_error);
}

TEST_F(LicenceLines, TreeHasThem) {
  EXPECT_THAT(check_licence_lines(kRoot), IsEmpty());
}

TEST_F(LicenceLines, MissingLineIsFound) {
  plant("src/comm/wrong.cc", "// SPDX-License-Identifier: MIT\n", "// A file.");
  plant("src/comm/CMakeLists.txt", "#\n#\n# SPDX-License-Identifier: Apache-2.0\n", "# too late");

  EXPECT_THAT(check_licence_lines(root_), ElementsAre(HasSubstr("src/comm/CMakeLists.txt:1"), HasSubstr("src/comm/wrong.cc:1")));
}

TEST_F(DeviceLiterals, TreeHasNone) {
  EXPECT_THAT(check_device_literals(kRoot), IsEmpty());
}

TEST_F(DeviceLiterals, EachKindIsFoundOutsideCommentsAndTests) {
  plant("src/optim/wrong.cc", "x.to(at::kCUDA);\nat::Device(\"cuda:0\");\ny = x.cpu();\n// kCPU in a comment\nkCPUCount;\n");
  plant("src/optim/fine_test.cc", "x.to(at::kCUDA);\n");

  EXPECT_THAT(check_device_literals(root_),
              ElementsAre(HasSubstr("src/optim/wrong.cc:2: device literal kCUDA"), HasSubstr("wrong.cc:3"), HasSubstr("wrong.cc:4")));
}

TEST_F(OrphanTests, TreeHasNone) {
  EXPECT_THAT(check_orphan_tests(kRoot, kBuild / "compile_commands.json"), IsEmpty());
}

TEST_F(OrphanTests, TestInNoTargetIsFound) {
  plant("src/comm/known_test.cc", "");
  plant("src/comm/forgotten_test.cc", "");
  std::ofstream(root_ / "compile_commands.json")
      << fmt::format(R"([{{"directory": "{0}", "file": "{0}/src/comm/known_test.cc"}}])", root_.string());

  EXPECT_THAT(check_orphan_tests(root_, root_ / "compile_commands.json"), ElementsAre(HasSubstr("src/comm/forgotten_test.cc:1")));
}

TEST_F(ContractsPage, NamesTestsAndFaultsThatExist) {
  EXPECT_THAT(check_contracts_page(kRoot), IsEmpty());
}

TEST_F(ContractsPage, UnknownNamesAreFound) {
  plant("src/comm/sum_test.cc", "TEST(Sum,\n     IsExact) {}\nTEST_P(SumOfAll, Works) {}\n");
  plant("docs/faults.md", "| `sum_missing` | A: ddp | No sum. |\n");
  plant("docs/contracts.md", "| sum | exact | `Sum.IsExact` | `sum_missing` |\n| sum | exact | `Sum.IsExcat` | `sum_mising` |\n");

  plant("docs/failures.md", "| 1 | `Sum.IsExact` |\n| 2 | `Sum.IsKilled`, `raise` |\n");

  EXPECT_THAT(check_contracts_page(root_), ElementsAre(HasSubstr("contracts.md:3: no test or fault is called Sum.IsExcat"),
                                                       HasSubstr("contracts.md:3: no test or fault is called sum_mising"),
                                                       HasSubstr("failures.md:3: no test is called Sum.IsKilled")));
}

}  // namespace
}  // namespace isoshard
