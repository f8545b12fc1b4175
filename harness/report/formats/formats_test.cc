// SPDX-License-Identifier: Apache-2.0
/// Claims about whole reports: how parts follow each other, and what every format has.
#include "harness/report/formats/report_formats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <tuple>

#include "core/base/error.h"
#include "harness/report/card/card.h"
#include "harness/report/json/json_report.h"
#include "harness/report/summary.h"

namespace isoshard {
namespace {

using testing::HasSubstr;
using testing::Not;

ReportCase broken(const std::string& name) {
  return {.name = name, .failure = "rank 1 crashed"};
}

Report mixed() {
  Report report;
  report.notes = {"all runs have fp32 masters"};
  report.add(broken("a"));
  report.add(broken("b"));
  report.add(ReportGolden{"g", "match", "MATCH       g\n"}, kExitConforms);
  report.add(ReportExperiment{.name = "init", .text = "table\n", .json = R"({"holds": true})"});
  report.summary = "0 of 2 cases conform";
  return report;
}

TEST(WholeReport, PartsThatArePrintedOneByOneMakeTheWholeText) {
  const Report report = mixed();
  TextReport text;

  std::string printed = text.note(report.notes[0]);
  for (const ReportCase& item : report.cases) printed += text.add(item);
  printed += text.add(report.goldens[0]);
  printed += text.add(report.experiments[0]);
  printed += text.finish(report);

  EXPECT_EQ(printed, text_of(report));
}

TEST(WholeReport, CasesAreSeparatedByBlankLines) {
  Report report;
  report.add(broken("a"));
  report.add(broken("b"));
  report.summary = "0 of 2 cases conform";

  EXPECT_EQ(text_of(report),
            "INCOMPLETE  a: rank 1 crashed\n\nINCOMPLETE  b: rank 1 crashed\n\n"
            "0 of 2 cases conform\n");
}

TEST(WholeReport, CurvesAndGoldensFollowEachOtherLineByLine) {
  Report report;
  report.add(ReportGolden{"g", "match", "MATCH       g\n"}, kExitConforms);
  report.add(ReportGolden{"h", "match", "MATCH       h\n"}, kExitConforms);
  report.summary = "2 of 2 goldens match";

  EXPECT_EQ(text_of(report), "MATCH       g\nMATCH       h\n2 of 2 goldens match\n");
}

Verdict named(const std::string& slug, Status status, Strength strength) {
  Verdict verdict;
  verdict.status = status;
  verdict.strength = strength;
  verdict.subject = "ddp";
  verdict.case_slug = slug;
  verdict.reason = "because";
  return verdict;
}

Report of_each_status() {
  Report report;
  for (const auto& [name, status, strength] :
       {std::tuple{"a", Status::kConforms, Strength::kExact},
        std::tuple{"b", Status::kConforms, Strength::kWithinTolerance},
        std::tuple{"c", Status::kDiverges, Strength::kNone},
        std::tuple{"d", Status::kDiverges, Strength::kNone},
        std::tuple{"e", Status::kVacuous, Strength::kNone}})
    report.add(ReportCase{.name = name, .verdict = named(name, status, strength)});
  report.add(broken("f"));
  return report;
}

TEST(WholeReport, SummaryCountsPartsByStrengthAndNamesTheFirstOfTheOthers) {
  EXPECT_EQ(
      summary_of(of_each_status(), 7),
      "2 of 7 cases conform (1 exact, 1 within tolerance), 2 diverge (ddp c and 1 more), 1 is "
      "vacuous (ddp e), 1 is incomplete (f)");
  Report report;
  report.add(ReportCase{.name = "a", .verdict = named("a", Status::kConforms, Strength::kExact)});
  EXPECT_EQ(summary_of(report, "run"), "1 of 1 run conforms (exact)");
  EXPECT_EQ(summary_of(Report()), "0 of 0 cases conform");
}

TEST(WholeReport, BriefHasALineForWhatConformsAndACardForWhatDiverges) {
  Report report = of_each_status();
  Finding finding;
  finding.what = "loss (step 0): differs";
  finding.diagnosis = "scale 2 = dp";
  report.cases[2].verdict->findings = {finding};
  report.summary = "2 of 6 cases conform";
  report.provenance.command = {"./isoshard", "verify", "--model=a b"};
  TextOptions brief;
  brief.detail = Detail::kBrief;

  const std::string text = text_of(report, brief);

  EXPECT_THAT(text,
              testing::StartsWith("CONFORMS (exact)  ddp a (one process): 0 tensors\n"
                                  "CONFORMS (within tolerance)  ddp b (one process): 0 tensors\n\n"
                                  "DIVERGES  ddp c (one process)\n"
                                  "  What broke       loss (step 0): differs\n"
                                  "  Likely cause     scale 2 = dp\n"
                                  "  Where            c: step 0, forward, after the layers.\n"));
  EXPECT_THAT(text, testing::EndsWith("VACUOUS  ddp e (one process): because\n\n"
                                      "INCOMPLETE  f: rank 1 crashed\n"
                                      "  Repeat it        ./isoshard verify '--model=a b'\n\n"
                                      "2 of 6 cases conform\n"));
  brief.detail = Detail::kFull;
  EXPECT_THAT(text_of(report, brief), HasSubstr("  What broke       loss (step 0): differs\n"))
      << "what is told in full ends with the card, too";
}

TEST(WholeReport, LinesAreAsLongAsTheTerminalAllows) {
  EXPECT_EQ(wrapped("  one two three\nfour\n", 11), "  one two\n      three\nfour\n");
  EXPECT_EQ(wrapped("\033[1;31mred\033[0m word", 8), "\033[1;31mred\033[0m word");
  EXPECT_EQ(wrapped("\u00e9\u00e9\u00e9 \u00e9\u00e9", 6), "\u00e9\u00e9\u00e9 \u00e9\u00e9");
  EXPECT_EQ(wrapped("  a_word_that_does_not_fit x", 8), "  a_word_that_does_not_fit\n      x");
  EXPECT_EQ(hanging("  title  ", "one two three", 17), "  title  one two\n         three\n");
  EXPECT_EQ(hanging_command("  ", {"a", "--b=c", "--d"}, 11), "  a --b=c \\\n  --d\n");
}

TEST(WholeReport, WordsOfACommandAreWhatAShellMakesOfThem) {
  EXPECT_EQ(shell_word("--tp=2"), "--tp=2");
  EXPECT_EQ(shell_word(""), "''");
  EXPECT_EQ(shell_word("a b"), "'a b'");
  EXPECT_EQ(shell_word("it's"), R"('it'\''s')");
  EXPECT_EQ(shell_word("a\tb'"), R"($'a\x09b\'')");
}

TEST(WholeReport, SecondsAreAsExactAsAnybodyNeedsThem) {
  EXPECT_EQ(seconds_in_words(0.416), "0.42 s");
  EXPECT_EQ(seconds_in_words(3.14), "3.1 s");
  EXPECT_EQ(seconds_in_words(41.2), "41 s");
  EXPECT_EQ(seconds_in_words(1200), "20 min");
}

TEST(WholeReport, TheWorstPartDecidesTheExitCode) {
  Report report;
  EXPECT_EQ(report.exit_code, kExitConforms);
  report.add(ReportGolden{"g", "refused", ""}, kExitGolden);
  EXPECT_EQ(report.exit_code, kExitGolden);
  report.add(ReportExperiment{.name = "init", .holds = false});
  EXPECT_EQ(report.exit_code, kExitDiverges);
  report.add(ReportCurve{.name = "c", .failure = "rank 0 crashed"});
  EXPECT_EQ(report.exit_code, kExitInfrastructure);
}

TEST(WholeReport, AFileHasNoColors) {
  Report report;
  report.add(ReportCase{.name = "a", .verdict = Verdict()});
  TextOptions options;
  options.verdict.color = true;

  EXPECT_THAT(text_of(report, options), HasSubstr("\033"));
  EXPECT_THAT(find_report_format("text").write(report, options), Not(HasSubstr("\033")));
}

TEST(WholeReport, EveryFormatWritesEveryReport) {
  for (const ReportFormat& format : report_formats()) {
    EXPECT_THAT(format.write(mixed(), {}), HasSubstr("rank 1 crashed")) << format.name;
    EXPECT_EQ(find_report_format(format.name).file_name, format.file_name);
  }
  EXPECT_THROW((void)find_report_format("jsn"), UsageError);
}

Verdict conforming(Strength strength) {
  Verdict verdict;
  verdict.status = Status::kConforms;
  verdict.strength = strength;
  verdict.subject = "autotp";
  verdict.copy_of = "DeepSpeed AutoTP";
  verdict.reason = "3 tensors < 4 & \"more\"";
  return verdict;
}

TEST(WholeReport, WhatIsWeakerThanRequiredExitsWith1AndSaysWhy) {
  ReportCase weak{.name = "a", .verdict = conforming(Strength::kWithinTolerance)},
      strong{.name = "b", .verdict = conforming(Strength::kExact)}, wrong = broken("c");
  for (ReportCase* item : {&weak, &strong, &wrong})
    require_strength(*item, parse_required_strength("exact"));
  Report report;
  report.add(strong);
  EXPECT_EQ(report.exit_code, kExitConforms);
  report.add(weak);
  EXPECT_EQ(report.exit_code, kExitDiverges);

  EXPECT_THAT(text_of(report), HasSubstr("NOT ENOUGH  a: the verdict must be exact, got within "
                                         "tolerance"));
  EXPECT_THAT(report_json(report)["cases"][1]["unmet"].get<std::string>(),
              HasSubstr("must be exact"));
  EXPECT_TRUE(report_json(report)["cases"][0]["unmet"].is_null());
  EXPECT_EQ(wrong.exit_code(), kExitInfrastructure);
  require_strength(weak, parse_required_strength("any"));
  EXPECT_THROW((void)parse_required_strength("exakt"), UsageError);
}

TEST(WholeReport, JunitHasATestCaseForEachPart) {
  Report report = mixed();
  report.add(ReportCase{.name = "d", .verdict = conforming(Strength::kExact)});
  ReportCase weak{.name = "e", .verdict = conforming(Strength::kWithinTolerance)};
  require_strength(weak, Strength::kExact);
  report.add(weak);

  const std::string xml = find_report_format("junit").write(report, {});

  EXPECT_THAT(xml, testing::StartsWith("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"));
  for (
      const char* words :
      {"tests=\"6\" failures=\"1\" errors=\"2\"", "<error message=\"rank 1 crashed\"/>",
       "<property name=\"verdict\" value=\"CONFORMS (exact: equal to its reference bit by bit)\"/>",
       "<property name=\"strength\" value=\"within tolerance\"/>",
       "<property name=\"copy_of\" value=\"DeepSpeed AutoTP\"/>",
       "<failure message=\"the verdict must be exact, got within tolerance; 3 tensors &lt; 4 &amp; "
       "&quot;more&quot;\"/>",
       "classname=\"isoshard.golden\" name=\"g\""})
    EXPECT_THAT(xml, HasSubstr(words));
}

TEST(WholeReport, JsonNamesCurvesAndGoldensOnlyWhereThereAreSome) {
  EXPECT_FALSE(report_json(Report()).contains("curves"));
  EXPECT_TRUE(report_json(mixed()).contains("goldens"));
}

}  // namespace
}  // namespace isoshard
