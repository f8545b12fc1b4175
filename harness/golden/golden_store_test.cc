// SPDX-License-Identifier: Apache-2.0
// What is read was accepted and is as it was accepted; what may
// not become a golden is refused by name.
#include "harness/golden/golden_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/sha256.h"
#include "harness/golden/golden_review.h"
#include "harness/golden/test_golden.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr const char* kNow = "2026-02-03T04:05:06Z";

class GoldenFolder : public ::testing::Test {
 protected:
  GoldenFolder() { ::unsetenv("CI"); }
  [[nodiscard]] GoldenStore store() const { return GoldenStore(folder_ / "golden"); }
  [[nodiscard]] std::filesystem::path path(const char* name) const {
    return folder_ / "golden" / name;
  }
  void accept(const Golden& golden) const { store().accept(golden, "the first one", kNow); }
  [[nodiscard]] std::string text_of(const char* name) const { return content_of(path(name)); }
  /// Puts another file in place of an accepted one, and its SHA-256 into the manifest: nobody but
  /// the reader can see it.
  void smuggle(const Golden& golden) const {
    accept(test_golden());
    nlohmann::json manifest = nlohmann::json::parse(text_of("manifest.json"));
    write_file_atomically(path("curve_x.json"), golden_text(golden));
    manifest["goldens"]["curve_x"]["sha256"] = sha256(golden_text(golden));
    write_file_atomically(path("manifest.json"), manifest.dump());
  }
  static std::string sha256(const std::string& text);
  [[nodiscard]] std::string refusal_to_read(const std::string& name = "curve_x") const {
    try {
      (void)store().read(name);
    } catch (const GoldenError& error) {
      return error.what();
    }
    return "no error";
  }
  [[nodiscard]] std::string refusal_to_accept(const Golden& golden,
                                              const std::string& reason = "a reason") const {
    GoldenStore goldens = store();
    try {
      goldens.accept(golden, reason, kNow);
    } catch (const GoldenError& error) {
      EXPECT_FALSE(std::filesystem::exists(path("curve_x.json"))) << "nothing is written";
      EXPECT_FALSE(std::filesystem::exists(path("manifest.json")));
      return error.what();
    }
    return "no error";
  }
  TestFolder folder_;
};
class GoldenStoreFolder : public GoldenFolder {};
class GoldenAcceptance : public GoldenFolder {};

TEST_F(GoldenStoreFolder, GivesBackWhatWasAccepted) {
  accept(test_golden());
  accept(test_golden("curve_y"));

  const GoldenStore read = store();

  EXPECT_EQ(golden_text(read.read("curve_x")), golden_text(test_golden()));
  ASSERT_EQ(read.entries().size(), 2U);
  const GoldenEntry& entry = read.entries().at("curve_x");
  EXPECT_EQ(entry.file, "curve_x.json");
  EXPECT_EQ(entry.reason, "the first one");
  EXPECT_EQ(entry.recorded, "2026-01-02T03:04:05Z");
  EXPECT_EQ(entry.accepted, kNow);
  EXPECT_EQ(entry.sha256.size(), 64U);
  EXPECT_THAT(read.unlisted_files(), IsEmpty());
}

TEST_F(GoldenStoreFolder, AMissingGoldenNamesTheCommandThatCreatesIt) {
  EXPECT_THAT(refusal_to_read(),
              AllOf(HasSubstr("curve_x"), HasSubstr("isoshard golden record curve_x"),
                    HasSubstr("isoshard golden accept curve_x --reason")));
  accept(test_golden());
  std::filesystem::remove(path("curve_x.json"));
  EXPECT_THAT(refusal_to_read(), AllOf(HasSubstr("curve_x.json"), HasSubstr("git checkout"),
                                       HasSubstr("isoshard golden record")));
}

TEST_F(GoldenStoreFolder, AFileThatWasEditedByHandIsToldByItsHash) {
  accept(test_golden());
  std::string text = text_of("curve_x.json");
  text.replace(text.find("0000000000001p+1"), 16, "0000000000002p+1");
  write_file_atomically(path("curve_x.json"), text);

  EXPECT_THAT(refusal_to_read(), AllOf(HasSubstr("was edited after it was accepted"),
                                       HasSubstr("git checkout"), HasSubstr("record")));
}

TEST_F(GoldenStoreFolder, NanAndInfinitiesInsideAreRefused) {
  for (const double value : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    Golden golden = test_golden();
    golden.lines[1].numbers[0].value = value;
    smuggle(golden);

    EXPECT_THAT(refusal_to_read(),
                AllOf(HasSubstr("loss of step 1 is"), HasSubstr("isoshard golden record")));
  }
  Golden golden = test_golden();
  golden.lines[1].numbers[0].drift = std::numeric_limits<double>::infinity();
  smuggle(golden);
  EXPECT_THAT(refusal_to_read(), HasSubstr("may drift by inf"));
}

TEST_F(GoldenStoreFolder, FewerStepsThanItsCountAreRefused) {
  accept(test_golden());
  std::string text = golden_text(test_golden());
  const std::size_t last = text.find(",\n  {\"name\":\"step 2\"");
  text = text.substr(0, last) + "\n ]\n}\n";
  nlohmann::json manifest = nlohmann::json::parse(text_of("manifest.json"));
  manifest["goldens"]["curve_x"]["sha256"] = sha256(text);
  write_file_atomically(path("manifest.json"), manifest.dump());
  write_file_atomically(path("curve_x.json"), text);

  EXPECT_THAT(refusal_to_read(), AllOf(HasSubstr("count must be the number of lines, 2, got 4"),
                                       HasSubstr("isoshard golden record")));
}

TEST_F(GoldenStoreFolder, AnotherGoldensFileUnderTheNameIsRefused) {
  smuggle(test_golden("curve_y"));

  EXPECT_THAT(refusal_to_read(), HasSubstr("must hold the golden curve_x, got curve_y"));
}

TEST_F(GoldenStoreFolder, FilesThatTheManifestDoesNotListAreNamed) {
  accept(test_golden());
  write_file_atomically(path("curve_y.json"), golden_text(test_golden("curve_y")));
  write_file_atomically(path("notes.txt"), "x");

  EXPECT_THAT(store().unlisted_files(), ElementsAre("curve_y.json", "notes.txt"));
}

TEST_F(GoldenStoreFolder, AManifestThatIsNoneIsRefused) {
  accept(test_golden());
  for (const char* text :
       {"{", "[]", R"({"schema": 2, "goldens": {}})",
        R"({"schema": 1, "goldens": {"x": {"file": "../x.json"}}})",
        R"({"schema": 1, "goldens": {"x": {"file": "../x.json", "sha256": "", "reason": "",)"
        R"( "recorded": "", "accepted": ""}}})"}) {
    write_file_atomically(path("manifest.json"), text);
    try {
      (void)store();
      ADD_FAILURE() << text;
    } catch (const GoldenError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("manifest.json"), HasSubstr("git checkout")));
    }
  }
}

TEST_F(GoldenAcceptance, RefusesAnEmptyReason) {
  EXPECT_THAT(refusal_to_accept(test_golden(), ""), HasSubstr("--reason"));
  EXPECT_THAT(refusal_to_accept(test_golden(), " \t\n"), HasSubstr("--reason"));
}

TEST_F(GoldenAcceptance, RefusesNanAndInfinities) {
  Golden golden = test_golden();
  golden.lines[1].numbers[0].value = std::nan("");

  EXPECT_THAT(refusal_to_accept(golden),
              AllOf(HasSubstr("curve_x: was not accepted"), HasSubstr("loss of step 1 is nan")));
}

TEST_F(GoldenAcceptance, RefusesARunWhoseParityCheckFailed) {
  Golden golden = test_golden();
  golden.parity = {false, "step 3: loss is 4, the reference's 3"};

  EXPECT_THAT(refusal_to_accept(golden),
              AllOf(HasSubstr("parity check failed"), HasSubstr("step 3: loss is 4")));
}

TEST_F(GoldenAcceptance, RefusesDirtyUnknownAndSanitizedBuilds) {
  Golden golden = test_golden();
  golden.build.state = "dirty";
  EXPECT_THAT(refusal_to_accept(golden), HasSubstr("changed after commit"));
  golden.build = {"", "unknown", ""};
  EXPECT_THAT(refusal_to_accept(golden), HasSubstr("not under version control"));
  golden.build = {std::string(40, 'c'), "clean", "thread"};
  EXPECT_THAT(refusal_to_accept(golden), HasSubstr("sanitizers thread"));
}

TEST_F(GoldenAcceptance, IsRefusedWhereCiIsSet) {
  ::setenv("CI", "1", 1);
  EXPECT_THAT(refusal_to_accept(test_golden()), HasSubstr("CI is set"));
  EXPECT_THROW(write_pending(folder_ / "pending", test_golden()), GoldenError);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "pending"));
  ::unsetenv("CI");
}

TEST_F(GoldenAcceptance, RemovesWhatIsNoLongerListedInTheProgram) {
  accept(test_golden());
  accept(test_golden("curve_y"));
  EXPECT_THROW(store().remove("curve_z", "gone"), GoldenError);
  EXPECT_THROW(store().remove("curve_y", " "), GoldenError);

  store().remove("curve_y", "gone");

  EXPECT_EQ(store().entries().size(), 1U);
  EXPECT_FALSE(std::filesystem::exists(path("curve_y.json")));
}

TEST_F(GoldenAcceptance, PendingOnesAreReadByName) {
  EXPECT_THAT(read_pending(folder_ / "pending"), IsEmpty());
  write_pending(folder_ / "pending", test_golden());
  write_pending(folder_ / "pending", test_golden("curve_y"));

  const auto pending = read_pending(folder_ / "pending");

  ASSERT_EQ(pending.size(), 2U);
  EXPECT_EQ(golden_text(pending.at("curve_y")), golden_text(test_golden("curve_y")));
}

TEST_F(GoldenAcceptance, ReviewShowsOldNewUlpsAndFingerprints) {
  const GoldenEntry entry{"curve_x.json", "", "the first one", "", kNow};
  Golden pending = test_golden();
  EXPECT_THAT(review_text(std::nullopt, pending),
              AllOf(HasSubstr("old      none"), HasSubstr("cpu A"), HasSubstr("parity   holds")));
  EXPECT_THAT(review_text(AcceptedGolden{test_golden(), entry}, pending),
              HasSubstr("every bit is equal"));
  pending.lines[1].numbers[0].value = 0x1.0000000000003p+1;
  pending.lines[2].digest = "00000000000000fe";
  pending.fingerprint["cpu"] = "B";
  pending.config["dtype"] = "\"bf16\"";

  const std::string text = review_text(AcceptedGolden{test_golden(), entry}, pending);

  EXPECT_THAT(
      text,
      AllOf(HasSubstr("the first one"), HasSubstr("cpu A"), HasSubstr("cpu B"),
            HasSubstr("2 lines differ"),
            HasSubstr("first step 1: loss: 0x1.0000000000001p+1 becomes 0x1.0000000000003p+1"),
            HasSubstr("2 ulp"), HasSubstr("dtype: golden \"fp32\", here \"bf16\""),
            HasSubstr("golden accept curve_x")));
  pending.parity.holds = false;
  EXPECT_THAT(review_text(std::nullopt, pending),
              AllOf(HasSubstr("FAILED"), HasSubstr("refused  its parity check failed")));
}

TEST_F(GoldenAcceptance, ReviewPairsLinesByName) {
  const GoldenEntry entry{"curve_x.json", "", "the first one", "", kNow};
  Golden pending = test_golden();
  pending.lines.insert(pending.lines.begin() + 1, {"learning rate", "0000000000000002", {}});
  pending.lines.pop_back();
  EXPECT_THAT(review_text(AcceptedGolden{test_golden(), entry}, pending),
              AllOf(HasSubstr("gone     step 2 again\n"), HasSubstr("added    learning rate\n"),
                    HasSubstr("none in the other lines")));
}

// What a golden asks of other machines may become less without any number that changes.
TEST_F(GoldenAcceptance, ReviewShowsWhatThePendingOneAsksLessOf) {
  const GoldenEntry entry{"curve_x.json", "", "the first one", "", kNow};
  Golden old = test_golden();
  old.lines[0].projections = StoredProjections{{}, 1};
  old.lines[1].projections = StoredProjections{{}, 1};
  old.lines[1].copies = "aab";
  old.lines[2].same_as = old.lines[1].name;
  Golden pending = old;
  EXPECT_THAT(review_text(AcceptedGolden{old, entry}, pending), Not(HasSubstr("weaker")));
  pending.lines[0].projections->allowed = 4;
  pending.lines[1].projections.reset();
  pending.lines[1].copies.clear();
  pending.lines[2].same_as.clear();

  const std::string text = review_text(AcceptedGolden{old, entry}, pending);

  EXPECT_THAT(text, AllOf(HasSubstr("1 limits for other machines grow; most: " + old.lines[0].name +
                                    ": projections: 1.000e+00 becomes 4.000e+00"),
                          HasSubstr("projections of 1 lines are lost; first " + old.lines[1].name),
                          HasSubstr("equal copies of 1 lines are lost"),
                          HasSubstr("the equal tensor of 1 lines are lost"),
                          Not(HasSubstr("every bit is equal"))));
}

std::string GoldenFolder::sha256(const std::string& text) {
  const TestFolder folder;
  write_file_atomically(folder / "x", text);
  return sha256_hex_of_file(folder / "x");
}

}  // namespace
}  // namespace isoshard
