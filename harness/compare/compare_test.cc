// SPDX-License-Identifier: Apache-2.0
/// Claims about what compare judges of a folder of runs, and what it says that it did not judge.
#include "harness/compare/compare.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "core/base/error.h"
#include "harness/compare/dumped_runs.h"
#include "harness/testing/bundle_edit.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using namespace synthetic;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

json settings_of(const std::string& source = "text", int seed = 0) {
  return {{"training", {{"dtype", "fp32"}, {"seed", seed}, {"data", {{"source", source}}}}}};
}

Body body(bool is_cut) {
  return [is_cut](Sink& sink, int rank) {
    sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})),
                   at::full({1}, 5.5, at::kDouble));
    const at::Tensor x = values({4, 6}, 1);
    const Layout cut = layout_of({4, 6}, {shard(Axis::kDp, 0), shard(Axis::kTp, 1)});
    (void)sink.on_activation(
        site(RecordKind::kActivation, "x", is_cut ? cut : layout_of({4, 6})),
        is_cut ? x.narrow(0, rank / 3 * 2, 2).narrow(1, rank % 3 * 2, 2).contiguous() : x);
    sink.on_record(site(RecordKind::kGrad, "w", layout_of({3})), values({3}, 3));
  };
}

/// A right run of one process, or of six ranks.
void write_run(const fs::path& bundle, const std::string& subject, const MeshShape& mesh,
               const json& settings = settings_of()) {
  Trace trace = run(mesh, nullptr, body(mesh == kDp2Tp3), Keep::kEverything);
  trace.subject = subject;
  write_bundle(bundle, trace, settings.dump());
}

void rename_subject(const fs::path& bundle, const std::string& subject) {
  bundle_edit::edit_json(bundle / "manifest.json", [&](json& m) { m["subject"] = subject; });
}

class DumpedFolder : public testing::Test {
 protected:
  DumpedFolder() {
    write_run(folder_ / "reference", "reference", MeshShape());
    write_run(folder_ / "run", "autotp", kDp2Tp3);
  }
  void expect_refused(RuleId rule, NamedValues values = {}) const {
    EXPECT_THAT([&] { (void)dumped_pairs(folder_.path()); },
                RefusesBy<FileError>(rule, std::move(values)));
  }

  TestFolder folder_;
};

TEST_F(DumpedFolder, OfSeveralRanksAreNoReferenceAndNoEmulation) {
  write_run(folder_ / "wrong", "ddp", kDp2Tp3);
  for (const char* subject : {"reference", "emulated autotp"}) {
    rename_subject(folder_ / "wrong", subject);
    expect_refused(RuleId::kReferenceOfSeveralRanks);
  }
  bundle_edit::edit_json(folder_ / "wrong" / "manifest.json",
                         [](json& m) { m["mesh"] = json::array(); });
  expect_refused(RuleId::kReferenceOfSeveralRanks);
}

TEST_F(DumpedFolder, HaveOneReferenceOfTheirSettings) {
  write_run(folder_ / "a_wrong", "reference", MeshShape());

  expect_refused(RuleId::kTwoReferences, {{"other", "a_wrong"}});
}

TEST_F(DumpedFolder, AreJudgedAgainstEveryReferenceThatHasTheirSettings) {
  // one whose batches come from a file, which its settings do not tell from the other
  write_run(folder_ / "a_second", "reference", MeshShape(), settings_of("batch file"));

  const auto found = dumped_pairs(folder_.path());

  ASSERT_EQ(found.pairs.size(), 2U);
  EXPECT_EQ(found.pairs[0].against, "a_second");
  EXPECT_EQ(found.pairs[1].against, "reference");
}

TEST_F(DumpedFolder, WhoseRunAloneSaysThatItsBatchesComeFromAFileNeedsTheOption) {
  write_run(folder_ / "run", "autotp", kDp2Tp3, settings_of("batch file"));

  EXPECT_THAT([&] { (void)dumped_pairs(folder_.path()); },
              RefusesBy<FileError>(RuleId::kNoReferenceWithSettings));
  EXPECT_EQ(dumped_pairs(folder_.path(), BatchFileOf::kEither).pairs.size(), 1U);
}

TEST_F(DumpedFolder, LeaveNoReferenceOver) {
  write_run(folder_ / "wrong", "reference", MeshShape(), settings_of("text", 5));

  expect_refused(RuleId::kReferenceWithoutRun);
}

TEST_F(DumpedFolder, ThatAreNotJudgedAreListedAtTheEnd) {
  write_run(folder_ / "emulated", "emulated autotp", MeshShape());
  fs::create_directories(folder_ / "shared");

  ComparePlan plan;
  plan.input_dir = folder_.path();

  const Report report = compare(plan);

  ASSERT_EQ(report.cases.size(), 1U);
  EXPECT_EQ(report.exit_code, 0) << report.cases[0].failure;
  EXPECT_EQ(report.summary,
            "1 of 1 case conforms (exact); 3 folders were not judged: emulated (the emulation of "
            "autotp), reference (a reference), shared (no bundle)");
}

class OwnWord : public testing::Test {
 protected:
  [[nodiscard]] Verdict judged(const json& trusted, const json& own,
                               BatchFileOf batch_file = BatchFileOf::kTrusted) const {
    write_run(folder_ / "reference", "reference", MeshShape(), trusted);
    write_run(folder_ / "run", "autotp", kDp2Tp3, own);
    ComparePlan plan;
    plan.reference = folder_ / "reference";
    plan.actual = folder_ / "run";
    plan.rules.batch_file = batch_file;
    return compare(plan).cases.at(0).verdict.value();
  }

  TestFolder folder_;
};

TEST_F(OwnWord, AboutABatchFileStandsInTheReason) {
  const Verdict plain = judged(settings_of(), settings_of());
  const Verdict own = judged(settings_of(), settings_of("batch file"), BatchFileOf::kEither);
  const Verdict trusted = judged(settings_of("batch file"), settings_of());

  EXPECT_EQ(own.status, Status::kConforms) << own.reason;
  EXPECT_THAT(plain.reason, Not(HasSubstr("come from a file")));
  EXPECT_THAT(own.reason, HasSubstr("the judged run alone says that the batches come from a file"));
  EXPECT_THAT(trusted.reason, Not(HasSubstr("come from a file")));
  EXPECT_THAT(trusted.notes, testing::Contains(HasSubstr("the trusted run says that the batches")));
}

TEST_F(OwnWord, AboutABatchFileIsTakenOnlyWhereItIsAllowed) {
  EXPECT_THAT([&] { (void)judged(settings_of(), settings_of("batch file")); },
              ThrowsMessage<UsageError>(
                  AllOf(HasSubstr("data.source"), HasSubstr("--allow-different-origins"))));
  EXPECT_THAT([&] { (void)judged(settings_of(), settings_of("text", 5)); },
              ThrowsMessage<UsageError>(Not(HasSubstr("--allow-different-origins"))))
      << "nothing comes from a file";
}

TEST_F(OwnWord, AboutASubjectWithoutATableStandsInTheReason) {
  const auto with_table_of = [](const char* subject, int tp) {
    json settings = settings_of();
    settings["judging"]["collectives"] = json::array(
        {json::object({{"subject", subject},
                       {"mesh", json::array({json::object({{"axis", "dp"}, {"degree", 2}}),
                                             json::object({{"axis", "tp"}, {"degree", tp}})})},
                       {"calls", json::array()}})});
    return settings;
  };
  constexpr const char* kWords = "what its ranks called and what its later forward passes read";

  EXPECT_THAT(judged(settings_of(), settings_of()).reason, Not(HasSubstr(kWords)));
  EXPECT_THAT(judged(with_table_of("ddp", 3), settings_of()).reason, HasSubstr(kWords));
  EXPECT_THAT(judged(with_table_of("autotp", 2), settings_of()).reason, HasSubstr(kWords));
  EXPECT_THAT(judged(with_table_of("autotp", 3), settings_of()).reason, Not(HasSubstr(kWords)));
}

TEST(TrustedCurve, SaysTheDtypeThatBoundsTheOther) {
  const TestFolder folder;
  const auto curve_of = [](const char* subject, const char* dtype, double moved) {
    Curve curve;
    curve.subject = curve.title = subject;
    curve.case_slug = "tiny";
    curve.mesh = {{"dp", 1}, {"tp", 1}};
    curve.settings = json::object({{"dtype", dtype}}).dump();
    for (int step = 0; step < 2; ++step)
      curve.steps.push_back({step, 4 + moved, {4 + moved}, 1, 1e-3});
    return curve;
  };
  Curve reference = curve_of("reference", "fp32", 0);
  reference.perturbed_runs = 1;
  reference.spreads = {{0.01, 0.01, 0.01}, {0.01, 0.01, 0.01}};
  write_curve(folder / "loss_reference.json", reference);
  write_curve(folder / "loss_ddp.json", curve_of("ddp", "bf16", 0.005));
  ComparePlan plan;
  plan.reference = folder / "loss_reference.json";
  plan.actual = folder / "loss_ddp.json";
  plan.allows_different_settings = true;
  plan.bounds_of = [](const Curve& actual) { return curve_bounds(actual, {}); };

  const Report report = compare(plan);

  EXPECT_EQ(report.curves.at(0).verdict.value().status, Status::kDiverges);
}

}  // namespace
}  // namespace isoshard
