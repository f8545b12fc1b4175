// SPDX-License-Identifier: Apache-2.0
// Claims about the page: it says what the report says, where, and lets nothing of a report run.
#include "harness/report/html/html_report.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/base/error.h"
#include "harness/report/report.h"

namespace isoshard {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

json tensor(const std::string& name, const std::string& stage, double error, double allowed) {
  return {{"step", 0},
          {"kind", stage == "forward" ? "activation" : "grad"},
          {"name", name},
          {"call", 0},
          {"stage", stage},
          {"level", "perturbed"},
          {"within", error <= allowed},
          {"unequal", error > 0 ? 7 : 0},
          {"relative_error", error},
          {"allowed_relative_error", allowed},
          {"insensitive", false}};
}

json a_report() {
  json item = {{"schema", kReportSchema},
               {"case", "qwen2_tp2_dp2"},
               {"status", "diverges"},
               {"strength", nullptr},
               {"reason", "1 of 4 tensors diverges"},
               {"subject", "autotp"},
               {"mesh", {{{"axis", "dp"}, {"degree", 2}}, {{"axis", "tp"}, {"degree", 2}}}},
               {"findings",
                {{{"step", 0},
                  {"kind", "grad"},
                  {"name", "model.layers.1.mlp.down_proj.weight"},
                  {"call", 0},
                  {"stage", "parameter gradient"},
                  {"finding", {{"id", "differs_from_reference"}}},
                  {"what", "differs"},
                  {"evidence", "scale 2"},
                  {"cause", {{"id", "scale"}}},
                  {"diagnosis", "scale 2 = dp"},
                  {"ranks", {1, 3}},
                  {"confirmed", true}}}},
               {"tensors",
                {tensor("model.embed_tokens", "forward", 0, 1e-3),
                 tensor("model.layers.0.mlp.down_proj", "forward", 2e-4, 1e-3),
                 tensor("model.layers.1.mlp.down_proj", "forward", 8e-4, 1e-3),
                 tensor("model.layers.1.mlp.down_proj.weight", "parameter gradient", 1, 1e-3),
                 tensor("model.layers.0.mlp.down_proj.weight", "parameter gradient", 0, 1e-3)}}};
  return {{"schema", kReportSchema}, {"exit_code", 1},
          {"cases", {item}},         {"tables", {}},
          {"notes", json::array()},  {"environment", {{"OMP_NUM_THREADS", "1"}}}};
}

TEST(HtmlReport, TellsTheVerdictBeforeAnythingElse) {
  const std::string page = html_of(a_report());

  EXPECT_THAT(page, HasSubstr("<h1>isoshard report: 1 diverges</h1>"));
  EXPECT_THAT(page,
              HasSubstr("<strong>The run does not compute what one process computes</strong>"));
  EXPECT_THAT(page, HasSubstr("Exit code 1."));
  EXPECT_LT(page.find("does not compute"), page.find("<section"));
  EXPECT_THAT(page, HasSubstr("<strong>DIVERGES</strong>"));
  EXPECT_THAT(page, HasSubstr("dp 2 x tp 2"));
  EXPECT_THAT(page, HasSubstr("<dt>Likely cause</dt><dd>scale 2 = dp</dd>"));
  EXPECT_THAT(page, HasSubstr("<dt>Ids</dt><dd>differs_from_reference, scale</dd>"));
  EXPECT_THAT(page, HasSubstr("<dt>Ranks</dt><dd>1, 3</dd>"));
}

TEST(HtmlReport, TellsANewReaderWhatBrokeWhereAndWhatToLookAt) {
  json report = a_report();
  report["provenance"]["command"] = {"isoshard", "verify", "--data=a b.bin"};

  const std::string page = html_of(report);

  const std::string hero = page.substr(0, page.find("<section"));
  EXPECT_THAT(hero, HasSubstr("<dt>What broke</dt><dd><b>differs</b></dd>"));
  EXPECT_THAT(hero, HasSubstr("<dt>Likely cause</dt><dd>scale 2 = dp</dd>"));
  EXPECT_THAT(hero, HasSubstr("step 0, parameter gradient, layer 1; first on rank 1 (dp 0, tp 1)"));
  EXPECT_THAT(hero, HasSubstr("All 3 tensors recorded before it are right, the last of them <span "
                              "class=name>model.layers.1.mlp.down_proj</span> (forward)"));
  EXPECT_THAT(hero, HasSubstr("Look at how this gradient is made and summed"));
  EXPECT_THAT(hero, HasSubstr("<code>isoshard verify '--data=a b.bin'</code>"));
}

TEST(HtmlReport, DoesNotSayThatAllBeforeIsRightWhereSomethingIsNot) {
  json report = a_report();
  report["cases"][0]["tensors"][1]["within"] = false;

  EXPECT_THAT(html_of(report), Not(HasSubstr("recorded before it are right")));
}

TEST(HtmlReport, SaysOfARunThatConformsNothingToLookAt) {
  json report = a_report();
  report["exit_code"] = 0;
  report["cases"][0]["status"] = "conforms";
  report["cases"][0]["strength"] = "within tolerance";
  report["cases"][0]["findings"] = json::array();

  const std::string page = html_of(report);

  EXPECT_THAT(page, HasSubstr("<strong>Passed: it computes what one process computes (within "
                              "tolerance)</strong>"));
  EXPECT_THAT(page, Not(HasSubstr("What broke")));
}

TEST(HtmlReport, FramesTheCellWhereTheRunFirstDiverges) {
  const std::string page = html_of(a_report());

  const std::size_t row = page.find("<th scope=row>layer 1</th>");
  ASSERT_NE(row, page.npos);
  const std::string cells = page.substr(row, page.find("</tr>", row) - row);
  EXPECT_THAT(cells, HasSubstr(">80 %</td>"));
  EXPECT_THAT(cells, HasSubstr("class=\"s3 here\""));
  EXPECT_THAT(cells, HasSubstr("1e+03 x"));
  const std::size_t other = page.find("<th scope=row>layer 0</th>");
  EXPECT_LT(other, row);
  EXPECT_THAT(page.substr(other, row - other), Not(HasSubstr("here")));
  EXPECT_THAT(page.substr(other, row - other), HasSubstr(">equal</td>"));
}

TEST(HtmlReport, ShowsTheTensorsBeforeAndAfterTheFirstDivergence) {
  const std::string page = html_of(a_report());

  const std::size_t table = page.find("<caption>Around the first divergence");
  ASSERT_NE(table, page.npos);
  const std::string rows = page.substr(table, page.find("</table>", table) - table);
  EXPECT_LT(rows.find("model.layers.1.mlp.down_proj</th>"), rows.find("<tr class=here>"));
  EXPECT_GT(rows.find("model.layers.0.mlp.down_proj.weight"), rows.find("<tr class=here>"));
}

/// Where the chart of the errors has its label `text`, and where its line of errors begins.
double y_of_label(const std::string& page, const std::string& text) {
  const std::size_t label = page.find(">" + text + "</text>");
  if (label == page.npos) return -1;
  const std::size_t y = page.rfind("y=\"", label) + 3;
  return std::stod(page.substr(y)) - 4;  // a label stands below its line
}
double first_error_y(const std::string& page) {
  const std::size_t errors = page.rfind("<polyline points=\"");
  return std::stod(page.substr(page.find(',', errors) + 1));
}

TEST(HtmlReport, DrawsAnErrorOfZeroOnALineOfItsOwn) {
  json report = a_report();
  const std::string page = html_of(report);
  report["cases"][0]["tensors"][0]["relative_error"] = 1e-4;
  const std::string without = html_of(report);

  EXPECT_NE(y_of_label(page, "0"), -1);
  EXPECT_EQ(first_error_y(page), y_of_label(page, "0"));
  EXPECT_GT(first_error_y(page), y_of_label(page, "1e-4"));
  EXPECT_EQ(y_of_label(without, "0"), -1);
  EXPECT_EQ(first_error_y(without), y_of_label(without, "1e-4"));
}

TEST(HtmlReport, LetsNothingOfAReportBecomeMarkup) {
  json report = a_report();
  const std::string evil = "<script>alert(\"1\")</script>&\x01";
  report["cases"][0]["case"] = evil;
  report["cases"][0]["reason"] = evil;
  report["cases"][0]["findings"][0]["diagnosis"] = evil;
  report["cases"][0]["tensors"][0]["name"] = evil;
  report["environment"] = {{evil, evil}};
  report["notes"] = {evil};
  report["cases"][0]["findings"][0]["ranks"] = {evil};
  report["cases"][0]["mesh"] = {{evil, evil}};
  report["cases"][0]["tensors"][0]["stage"] = evil;
  report["cases"][0]["status"] = evil;

  const std::string page = html_of(report);

  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;\\x01"));
}

TEST(HtmlReport, NeedsNoNetworkAndIsBelowTwoMegabytes) {
  json report = a_report();
  const std::string long_name = "model.layers.1." + std::string(60, 'm') + ".weight";
  for (int i = 0; i < 20'000; ++i)
    report["cases"][0]["tensors"].push_back(tensor(long_name, "parameter gradient", 1e-4, 1e-3));

  const std::string page = html_of(report);

  EXPECT_LT(page.size(), 2'000'000U);
  EXPECT_THAT(page, HasSubstr("16005 tensors that use less are left out"));
  for (const char* const reference : {"http:", "https:", "src=", "@import", "url("})
    EXPECT_THAT(page, Not(HasSubstr(reference)));
}

TEST(HtmlReport, StaysBelowTwoMegabytesWithHundredsOfCases) {
  json report = a_report();
  for (int i = 0; i < 40; ++i) {
    for (int layer = 0; layer < 30; ++layer) {
      report["cases"][0]["tensors"].push_back(tensor(fmt::format("model.layers.{}.mlp", layer),
                                                     fmt::format("stage {}", i), 1e-4, 1e-3));
    }
  }
  const json item = report["cases"][0];
  for (int i = 0; i < 200; ++i) report["cases"].push_back(item);

  const std::string page = html_of(report);

  EXPECT_LT(page.size(), 2'000'000U);
  EXPECT_THAT(page, HasSubstr("more cases are left out"));
}

TEST(HtmlReport, ShowsNanOnOneSideAsOver) {
  json report = a_report();
  json& wrong = report["cases"][0]["tensors"][3];
  wrong["relative_error"] = 0;
  wrong["nonfinite_mismatch"] = 5;

  const std::string page = html_of(report);

  EXPECT_THAT(page, HasSubstr(">over</td>"));
  EXPECT_THAT(page, HasSubstr("NaN or infinity on one side"));
}

TEST(HtmlReport, TakesLayersWithoutEnd) {
  json report = a_report();
  report["cases"][0]["tensors"][1]["name"] = "model.layers.99999999999999999999.w";
  report["cases"][0]["tensors"][2]["name"] = "layers." + std::string(300'000, '9');
  EXPECT_THAT(html_of(report), HasSubstr("after the layers"));
}

json a_benchmark() {
  json result;
  result["config"] = {{"impl", "autotp"}, {"model_name", "<b>"}, {"num_layers", 2}};
  result["gate"] = {{"state", "conforms"}, {"strength", "exact"}};
  result["summary"] = {{"avg_step_time_ms", 10},
                       {"p50_step_time_ms", 9.5},
                       {"num_steps", 4},
                       {"avg_tokens_per_sec", 1234.5},
                       {"model_flops_utilization", nullptr},
                       {"timing_breakdown", {{"forward_pct", 60}, {"communication_pct", 40}}}};
  result["collectives"] = {{{"purpose", "grad_reduce"},
                            {"calls_per_step_and_rank", 2},
                            {"bytes_per_step_all_ranks", 4096},
                            {"ms_per_step_and_rank", 4}}};
  // the third span is too narrow to be seen
  const json lane = {{"spans",
                      {{"forward", 0.0, 6.0},
                       {"grad_reduce", 6.0, 9.0},
                       {"backward", 9.0, 9.001},
                       {"optimizer", 9.001, 10.0}}},
                     {"cut", false}};
  result["timeline"] = {{"step", 5}, {"ranks", {lane, lane}}};
  return {
      {"schema", kReportSchema},
      {"exit_code", 0},
      {"cases", json::array()},
      {"benchmarks",
       {{{"name", "autotp_tp2"}, {"status", "measured"}, {"text", "A\n"}, {"result", result}}}}};
}

TEST(HtmlReport, ShowsWhereABenchmarksStepGoes) {
  const std::string page = html_of(a_benchmark());

  const std::string hero = page.substr(0, page.find("<section"));
  EXPECT_THAT(hero, AllOf(HasSubstr("<strong>Measured</strong>"), HasSubstr("1234.5 tokens/s"),
                          HasSubstr("<dt>Gate</dt><dd>conforms</dd>")));
  EXPECT_THAT(page, Not(HasSubstr("<b>,"))) << "names are text";
  EXPECT_THAT(page, HasSubstr("not shown: steps were faster"));
  EXPECT_THAT(page, HasSubstr("class=name>grad_reduce</th><td>2</td><td>4.0 KiB</td>"));
  EXPECT_THAT(page, HasSubstr("Timeline of step 5"));
  const std::size_t lane = page.find(">rank 1</text>");
  ASSERT_NE(lane, page.npos);
  const std::string drawn = page.substr(lane, page.find("</svg>", lane) - lane);
  EXPECT_THAT(drawn, AllOf(HasSubstr("class=p0"), HasSubstr("class=p4"), HasSubstr("class=p2")));
  EXPECT_THAT(drawn, Not(HasSubstr("class=p1")));
}

TEST(HtmlReport, TakesABenchmarkOfAnyShape) {
  json report = a_benchmark();
  report["benchmarks"][0]["result"]["timeline"]["ranks"] = {1, {{"spans", {1, {"x"}, {1, 2, 3}}}}};
  report["benchmarks"][0]["result"]["summary"] = "none";
  EXPECT_THAT(html_of(report), HasSubstr("autotp_tp2"));
  report["benchmarks"][0] = {{"name", "pairs"}, {"status", "regression"}, {"text", "slower"}};
  report["exit_code"] = 1;

  EXPECT_THAT(html_of(report), AllOf(HasSubstr("<strong>Something is wrong</strong>"),
                                     HasSubstr("<dd>slower</dd>"), HasSubstr("<pre>slower</pre>")));
}

TEST(HtmlReport, ShowsTimesOfCollectivesBesideTheCaseThatTheyAreOf) {
  json report = a_report();
  const json row = {{"purpose", "grad<b>"},
                    {"calls_per_step_and_rank", 3},
                    {"bytes_per_step_all_ranks", 2048},
                    {"ms_per_step_and_rank", 1.5},
                    {"median_call_ms", 0.25},
                    {"hidden_ms_per_step_and_rank", 0.5}};
  json blind = row;
  blind["purpose"] = "clip_norm";
  blind["hidden_ms_per_step_and_rank"] = nullptr;
  report["collective_times"] = {{{"case", "another"}, {"collectives", {row}}},
                                {{"case", "qwen2_tp2_dp2"}, {"collectives", {row, blind}}}};

  const std::string page = html_of(report);

  EXPECT_THAT(page, HasSubstr("Collectives by purpose"));
  EXPECT_THAT(page, HasSubstr("grad&lt;b&gt;</th><td>3</td><td>2.0 KiB</td><td>1.500</td>"
                              "<td>50.0 %</td><td>0.250</td><td>25.0 %</td>"));
  EXPECT_THAT(page, HasSubstr("<td>0.250</td><td>not measured</td>"));
  report["collective_times"].erase(1);
  EXPECT_THAT(html_of(report), Not(HasSubstr("Collectives by purpose")));
}

// Whoever hears the page goes from table to table by their names.
TEST(HtmlReport, GivesTablesOfSeveralCasesNamesOfTheirOwn) {
  json report = a_report();
  report["cases"].push_back(report["cases"][0]);

  const std::string page = html_of(report);

  std::map<std::string, int> names;
  constexpr std::string_view kName = "role=region aria-label=\"";
  for (std::size_t at = page.find(kName); at != page.npos; at = page.find(kName, at + 1)) {
    const std::size_t begin = at + kName.size();
    ++names[page.substr(begin, page.find('"', begin) - begin)];
  }
  EXPECT_GE(names.size(), 4U);
  for (const auto& [name, times] : names) EXPECT_EQ(times, 1) << name;
}

TEST(HtmlReport, SaysOfFaultsWhetherTheyWereFound) {
  json report = a_report();
  report["exit_code"] = 0;
  report["cases"][0]["fault"] = "dp_sum_missing";
  report["cases"][0]["detection"] = {{"as_expected", true}, {"problem", nullptr}};

  const std::string found = html_of(report);

  EXPECT_THAT(found, AllOf(HasSubstr("<h1>isoshard report: 1 found</h1>"),
                           HasSubstr("<strong>The mistake was found</strong>"),
                           HasSubstr("put into a right implementation on purpose"),
                           HasSubstr("<td class=\"name conforms\">found</td>")));
  report["exit_code"] = 1;
  report["cases"][0]["detection"] = {{"as_expected", false}, {"problem", "no alarm"}};
  EXPECT_THAT(html_of(report),
              AllOf(HasSubstr("<strong>The mistake was not found as it must be</strong>"),
                    HasSubstr("<td class=\"name diverges\">missed</td>")));
}

TEST(HtmlReport, RefusesWhatIsNoReport) {
  EXPECT_THAT([] { (void)html_of(json::array()); }, testing::Throws<FileError>());
  EXPECT_THAT([] { (void)html_of({{"schema", kReportSchema + 1}}); }, testing::Throws<FileError>());
}

}  // namespace
}  // namespace isoshard
