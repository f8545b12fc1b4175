// SPDX-License-Identifier: Apache-2.0
// Claims about what stands beside a verdict: ranks, numbers, placements, calls, schedules, curves.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "harness/report/html/html_curves.h"
#include "harness/report/html/html_evidence.h"

namespace isoshard {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

json key(const std::string& name) {
  return {{"step", 0}, {"kind", "grad"}, {"name", name}, {"call", 0}};
}

json part(int rank, std::vector<int> begin, std::vector<int> size, int unequal, double error) {
  return {{"rank", rank},       {"begin", begin},          {"size", size},    {"compared", 8},
          {"unequal", unequal}, {"relative_error", error}, {"max_abs", error}};
}

json held(const std::string& name, std::vector<json> parts) {
  json j = key(name);
  j["stage"] = "parameter gradient";
  j["shape"] = {4, 4};
  j["placement"] = "tp:shard(0)";
  j["flat"] = false;
  j["cut"] = false;
  j["parts"] = parts;
  return j;
}

/// Two tp ranks, of which the second is wrong in b.
json a_case() {
  json tensor = key("b");
  tensor["allowed_relative_error"] = 1e-3;
  json numbers = key("b");
  numbers.update({{"shape", {4, 4}},
                  {"row", 1},
                  {"column", 2},
                  {"whole", false},
                  {"summands", false},
                  {"sides",
                   {{{"rank", nullptr}, {"rows", {{1.5, 2.5}}}},
                    {{"rank", 1}, {"rows", {{1.5, 7.25}}}},
                    {{"rank", 0}, {"rows", {{nullptr, nullptr}}}}}}});
  const json a = held("a", {part(0, {0, 0}, {2, 4}, 0, 0), part(1, {2, 0}, {2, 4}, 0, 0)}),
             b = held("b", {part(0, {0, 0}, {2, 4}, 0, 0), part(1, {2, 0}, {2, 4}, 3, 0.5)});
  return {{"mesh", {{{"axis", "dp"}, {"degree", 1}}, {{"axis", "tp"}, {"degree", 2}}}},
          {"tensors", {tensor}},
          {"findings", {key("b")}},
          {"evidence", {{"around", {a, b}}, {"placements", {a}}, {"numbers", numbers}}}};
}

TEST(HtmlEvidence, ShowsWhichRankIsOffInWhichTensor) {
  const std::string html = html::by_rank_of(a_case());

  EXPECT_THAT(html, HasSubstr("<th scope=col>rank 1 (tp 1)</th>"));
  EXPECT_THAT(html, HasSubstr("<tr class=here><th scope=row class=name>b</th>"
                              "<td class=name>parameter gradient</td>"
                              "<td class=s0>equal</td><td class=s3>0.5</td></tr>"));
  EXPECT_LT(html.find("class=name>a</th>"), html.find("class=name>b</th>"));
}

TEST(HtmlEvidence, KeepsTheRanksThatDifferWhereThereIsNoRoomForAll) {
  json item = a_case();
  json& parts = item["evidence"]["around"][1]["parts"];
  for (int rank = 2; rank < 40; ++rank) parts.push_back(part(rank, {0, 0}, {2, 4}, 0, 0));
  parts.push_back(part(40, {0, 0}, {2, 4}, 1, 0.25));

  const std::string html = html::by_rank_of(item);

  EXPECT_THAT(html, HasSubstr("25 of 41 ranks are left out"));
  EXPECT_THAT(html, HasSubstr(">0.25</td>"));
}

TEST(HtmlEvidence, MarksTheNumbersThatDiffer) {
  const std::string html = html::numbers_of(a_case());

  EXPECT_THAT(html, HasSubstr("reference (one process)"));
  EXPECT_THAT(html, HasSubstr("<th scope=row>1</th><td>1.5</td><td class=off>7.25</td>"));
  EXPECT_THAT(html, HasSubstr("<td class=none>.</td><td class=none>.</td>"));
}

TEST(HtmlEvidence, DrawsWhoHoldsWhat) {
  const std::string html = html::placements_of(a_case());

  EXPECT_THAT(html, HasSubstr("rank 0: 0 to 1, 0 to 3; rank 1: 2 to 3, 0 to 3"));
  EXPECT_THAT(html, HasSubstr("<rect x=0.0 y=45.0 width=200.0 height=45.0 class=p1 />"));
  EXPECT_THAT(html, HasSubstr("Who holds the tensor that diverges first"));
}

TEST(HtmlEvidence, DrawsCopiesOnce) {
  json item = a_case();
  item["findings"] = json::array();
  item["evidence"]["placements"][0]["parts"] = {
      part(0, {0, 0}, {4, 4}, 0, 0), part(1, {0, 0}, {4, 4}, 0, 0), part(2, {0, 0}, {4, 4}, 0, 0)};

  const std::string html = html::placements_of(item);

  EXPECT_THAT(html, HasSubstr("ranks 0 to 2: 0 to 3, 0 to 3"));
  EXPECT_EQ(html.find("<rect"), html.rfind("<rect"));
}

TEST(HtmlEvidence, PutsRanksTogetherThatCallTheSame) {
  const json run = {{"op", "all_reduce"},
                    {"purpose", "grad_reduce"},
                    {"bytes", 4096},
                    {"repeat", 3}},
             other = {{"op", "broadcast"}, {"purpose", "setup"}, {"bytes", 8}, {"repeat", 1}};
  json item;
  for (int rank = 0; rank < 3; ++rank) {
    item["evidence"]["calls"].push_back(
        {{"rank", rank}, {"axis", "dp"}, {"runs", {rank == 2 ? other : run}}, {"cut", false}});
  }

  const std::string html = html::calls_of(item);

  EXPECT_THAT(html, HasSubstr("<td class=name>0, 1</td>"));
  EXPECT_THAT(html, HasSubstr("all_reduce <small>grad_reduce</small> 3 x 4.1 kB"));
  EXPECT_THAT(html, HasSubstr("broadcast <small>setup</small> 8 B"));
}

TEST(HtmlEvidence, DrawsAScheduleAndSaysHowLongRanksAreIdle) {
  json item;
  const auto add = [&](int rank, double start, double end, const char* label) {
    item["schedule"].push_back({{"rank", rank}, {"start", start}, {"end", end}, {"label", label}});
  };
  add(0, 0, 1, "F0");
  add(1, 1, 2, "F0");
  add(1, 2, 4, "B0");
  add(0, 4, 6, "B0");

  const std::string html = html::schedule_of(item);

  EXPECT_THAT(html, HasSubstr("idle for 50 % of the time"));
  EXPECT_THAT(html, HasSubstr("<th scope=row>pp 1</th><td class=name> F0 B0</td>"));
}

json a_curve(const char* name, std::vector<double> losses, json allowed) {
  json points = {{"steps", {0, 1, 2}}, {"loss", losses}, {"grad_norm", {1, 1, 1}}};
  if (!allowed.is_null()) points["allowed"] = allowed;
  return {{"case", name}, {"title", name}, {"points", points}};
}

TEST(HtmlEvidence, DrawsEachCurveItsDistanceAndWhatIsAllowed) {
  const json report = {
      {"curves",
       {a_curve("reference", {4, 3, 2}, nullptr), a_curve("ddp", {4, 3.25, 2}, {0.5, 0.5, 0.5})}}};

  const std::string html = html::curves_of(report);

  EXPECT_THAT(html, HasSubstr("class=band"));
  EXPECT_THAT(html, HasSubstr("Distance from the first run"));
  EXPECT_THAT(html, HasSubstr("class=\"allowed l1\""));
  EXPECT_THAT(html, HasSubstr("<th scope=row>1</th><td>3</td><td>3.25</td>"));
}

TEST(HtmlEvidence, TakesCurvesWithoutNumbers) {
  const json report = {{"curves", {a_curve("reference", {}, nullptr), {{"case", "x"}}}}};
  EXPECT_THAT(html::curves_of(report), IsEmpty());
  json nan = a_curve("ddp", {1, 2, 3}, nullptr);
  nan["points"]["loss"] = {"nan", "inf", 3};
  const std::string html = html::curves_of({{"curves", {nan, nan}}});
  EXPECT_THAT(html, Not(HasSubstr("nan,")));
}

TEST(HtmlEvidence, SaysNothingOfWhatIsNotThere) {
  const json nothing = json::object();
  EXPECT_THAT(html::by_rank_of(nothing), IsEmpty());
  EXPECT_THAT(html::numbers_of(nothing), IsEmpty());
  EXPECT_THAT(html::placements_of(nothing), IsEmpty());
  EXPECT_THAT(html::calls_of(nothing), IsEmpty());
  EXPECT_THAT(html::schedule_of(nothing), IsEmpty());
}

}  // namespace
}  // namespace isoshard
