// SPDX-License-Identifier: Apache-2.0
// `golden` through the whole program: from nothing to an
// accepted golden, and all that is refused on the way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "app/options/verify_options.h"
#include "app/testing/malformed_rows.h"
#include "core/base/atomic_file.h"
#include "harness/golden/golden_mode.h"
#include "harness/golden/golden_store.h"
#include "suite/goldens/golden_specs.h"
#include "suite/testing/json_schema.h"

namespace isoshard {
namespace {

using malformed::Arguments;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr const char* kName = "lattice_ddp_dp2_bf16";

struct Ran {
  int code = -1;
  std::string output;
};

class GoldenCommand : public ::testing::Test {
 protected:
  GoldenCommand() { ::unsetenv("CI"); }

  Ran golden(const std::string& action, const Arguments& more,
             const std::function<void()>& prepare = nullptr) const {
    Arguments all = {"golden", action, "--golden-dir", "accepted", "--output-dir", "pending"};
    all.insert(all.end(), more.begin(), more.end());
    const ChildResult result = malformed::run_isoshard(folder_.path(), all, prepare);
    return {result.exit_code, result.output + result.error};
  }
  /// As if this program had been built from what was committed.
  void make_pending_clean() const {
    Golden pending = read_pending(folder_ / "pending").at(kName);
    pending.build = {std::string(40, 'c'), "clean", ""};
    write_pending(folder_ / "pending", pending);
  }
  void record_and_accept() const {
    EXPECT_EQ(golden("record", {kName}).code, 0);
    make_pending_clean();
    EXPECT_EQ(golden("accept", {"--reason", "a test"}).code, 0);
  }
  TestFolder folder_;
};

TEST_F(GoldenCommand, GoesFromNothingToAMatch) {
  const Ran missing = golden("verify", {kName});
  EXPECT_EQ(missing.code, 5);
  EXPECT_THAT(missing.output, AllOf(HasSubstr("there is no golden of that name"),
                                    HasSubstr("isoshard golden record " + std::string(kName))));
  EXPECT_EQ(golden("status", {kName}).code, 5);

  const Ran recorded = golden("record", {kName});
  EXPECT_EQ(recorded.code, 0) << recorded.output;
  EXPECT_THAT(recorded.output, HasSubstr("PENDING     lattice_ddp_dp2_bf16"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "accepted"))
      << "recording writes pending files only";
  EXPECT_THAT(golden("status", {kName}).output, HasSubstr("PENDING     lattice_ddp_dp2_bf16"));
  make_pending_clean();
  const Ran reviewed = golden("review", {});
  EXPECT_EQ(reviewed.code, 0);
  EXPECT_THAT(reviewed.output, AllOf(HasSubstr("old      none"), HasSubstr("parity   holds"),
                                     HasSubstr("arithmetic")));
  const Ran accepted = golden("accept", {kName, "--reason", "the first one"});
  EXPECT_EQ(accepted.code, 0) << accepted.output;

  EXPECT_TRUE(read_pending(folder_ / "pending").empty());
  const Ran verified = golden("verify", {kName});
  EXPECT_EQ(verified.code, 0) << verified.output;
  EXPECT_THAT(verified.output, AllOf(HasSubstr("MATCH       lattice_ddp_dp2_bf16"),
                                     HasSubstr("1 of 1 goldens match")));
  const Ran listed = golden("status", {kName});
  EXPECT_EQ(listed.code, 0);
  EXPECT_THAT(listed.output, HasSubstr("the first one"));
}

TEST_F(GoldenCommand, AFaultIsARegressionAndCannotBeAccepted) {
  record_and_accept();

  const Ran verified = golden("verify", {kName, "--fault", "dp_sum_missing"});
  EXPECT_EQ(verified.code, 1);
  EXPECT_THAT(verified.output,
              AllOf(HasSubstr("REGRESSION"),
                    HasSubstr("look further: isoshard verify --model lattice --subjects ddp")));
  const Ran recorded = golden("record", {kName, "--fault", "dp_sum_missing"});
  EXPECT_EQ(recorded.code, 1);
  EXPECT_THAT(golden("review", {}).output,
              AllOf(HasSubstr("FAILED"), HasSubstr("lines differ"), HasSubstr("refused")));
  make_pending_clean();
  const Ran accepted = golden("accept", {"--reason", "it is red"});
  EXPECT_EQ(accepted.code, 5);
  EXPECT_THAT(accepted.output, HasSubstr("parity check failed"));
  EXPECT_EQ(golden("verify", {kName}).code, 0) << "the accepted one is as it was";
}

TEST_F(GoldenCommand, TheStateOfThisBuildDecides) {
  EXPECT_EQ(golden("record", {kName}).code, 0);

  const Ran accepted = golden("accept", {kName, "--reason", "a test"});

  EXPECT_EQ(accepted.code, unfit_for_goldens(build_info()).empty() ? 0 : 5) << accepted.output;
}

TEST_F(GoldenCommand, IsRefusedWhereCiIsSetAndWritesNothing) {
  record_and_accept();
  const auto before = malformed::tree_of(folder_.path());
  const auto ci = [] { ::setenv("CI", "true", 1); };

  for (const Ran& ran : {golden("record", {kName}, ci), golden("accept", {"--reason", "x"}, ci),
                         golden("accept", {"--remove", kName, "--reason", "x"}, ci)}) {
    EXPECT_EQ(ran.code, 5) << ran.output;
    EXPECT_THAT(ran.output, HasSubstr("CI is set"));
  }
  EXPECT_EQ(golden("verify", {kName}, ci).code, 0) << "CI checks";
  EXPECT_EQ(malformed::tree_of(folder_.path()), before);
}

TEST_F(GoldenCommand, WhatIsWrongInTheFolderIsExitFiveWithTheCommandThatMendsIt) {
  record_and_accept();
  const std::filesystem::path file = folder_ / "accepted" / golden_file_name(kName);
  const std::string text = content_of(file);

  write_file_atomically(file, text + " ");
  const Ran edited = golden("verify", {kName});
  EXPECT_EQ(edited.code, 5);
  EXPECT_THAT(edited.output, AllOf(HasSubstr("was edited"), HasSubstr("git checkout"),
                                   HasSubstr("isoshard golden record")));
  EXPECT_EQ(golden("status", {kName}).code, 5);
  write_file_atomically(file, text);
  write_file_atomically(folder_ / "accepted" / "curve_old.json", text);
  const Ran unlisted = golden("status", {});
  EXPECT_EQ(unlisted.code, 5);
  EXPECT_THAT(unlisted.output, HasSubstr("curve_old.json: the manifest does not list this golden"));
  Golden old = parse_golden(text, file);
  old.name = "curve_old";
  GoldenStore(folder_ / "accepted").accept(old, "an old one", "2026-01-01T00:00:00Z");
  EXPECT_THAT(golden("status", {}).output,
              HasSubstr("isoshard golden accept --remove curve_old --reason TEXT"));
  EXPECT_EQ(golden("accept", {"--remove", "curve_old", "--reason", "no longer made"}).code, 0);
  EXPECT_THAT(golden("status", {}).output, Not(HasSubstr("curve_old")));
}

TEST_F(GoldenCommand, UsageIsExitTwoBeforeAnythingRuns) {
  struct {
    Arguments words;
    const char* says;
  } const rows[] = {
      {{"golden"}, "nothing selected"},
      {{"golden", "recrod"}, "did you mean 'record'"},
      {{"golden", "verify", "lattice_ddp_dp2_fp16"}, "did you mean 'lattice_ddp_dp2_bf16'"},
      {{"golden", "review", "--output-dir", "none"}, "nothing selected"},
      {{"golden", "record", kName, "--output-dir", "x", "--golden-dir", "./x"},
       "only accept writes to"},
      {{"golden", "verify", kName, "--reason", "x"}, "--reason is not an option of golden verify"},
      {{"golden", "accept", "--remove", "--reason", "x"}, "name the goldens to --remove"},
      {{"golden", "record", kName, "--fault", "dp_sum_mising"}, "did you mean"},
  };
  for (const auto& row : rows) {
    const ChildResult result =
        malformed::run_isoshard(folder_.path(), row.words, malformed::refuse_new_processes);

    EXPECT_EQ(result.exit_code, 2) << row.says << ": " << result.error;
    EXPECT_THAT(result.error, HasSubstr(row.says));
  }
  EXPECT_TRUE(folder_.empty());
}

nlohmann::json json_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

TEST(GoldenSchema, DescribesEveryGolden) {
  const Schema schema(json_of(std::filesystem::path(ISOSHARD_DOCS_DIR) / "golden.schema.json"));
  for (const GoldenSpec& spec : golden_specs()) {
    const nlohmann::json golden = json_of(default_golden_folder() / (spec.name + ".json"));
    EXPECT_EQ(schema.problem(golden), "") << spec.name;
    for (const char* const key : {"lines", "arithmetic", "parity"}) {
      nlohmann::json lacking = golden;
      lacking.erase(key);
      EXPECT_NE(schema.problem(lacking), "") << spec.name << " without " << key;
    }
  }
}

TEST(GoldenPages, TheCommandToLookFurtherIsOfTheSameRun) {
  for (const GoldenSpec& spec : golden_specs()) {
    std::istringstream command(look_further(spec, 2));
    Arguments words;
    for (std::string word; command >> word;) words.push_back(word);
    ASSERT_EQ(words.at(1), "verify");
    OptionTable table;
    declare_verify_options(table);

    const VerifyRequest request =
        verify_request_of(parse_options(table, {words.begin() + 2, words.end()}));

    Case expected = spec.item;
    if (spec.kind == GoldenKind::kCurve) expected.steps = 3;
    if (expected.subject == "reference") expected.subject = "ddp";
    ASSERT_EQ(request.cases.size(), 1U) << spec.name;
    EXPECT_EQ(request.cases.front().slug(), expected.slug());
  }
}

}  // namespace
}  // namespace isoshard
