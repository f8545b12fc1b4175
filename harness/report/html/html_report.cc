// SPDX-License-Identifier: Apache-2.0
// The page: the verdict first, then each part of the report.
#include "harness/report/html/html_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "harness/report/html/html_benchmark.h"
#include "harness/report/html/html_curves.h"
#include "harness/report/html/html_evidence.h"
#include "harness/report/html/html_hero.h"
#include "harness/report/html/html_parts.h"
#include "harness/report/html/html_text.h"
#include "harness/report/report.h"

namespace isoshard {
namespace {

using nlohmann::json;

/// Rows of all tables of tensors together: about 250 bytes each, so that a page stays below 2 MB.
constexpr std::size_t kRows = 4000;
/// From this size on only what is wrong is told in full, and from the larger one nothing.
constexpr std::size_t kDetails = 1'200'000, kPage = 1'700'000;

std::string in_capitals(std::string word) {
  for (char& c : word) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return word;
}

std::string mesh_of(const json& item) {
  std::string words;
  const auto found = item.find("mesh");
  if (found == item.end()) return "";
  if (found->is_object()) {
    for (const auto& [axis, degree] : found->items())
      words += fmt::format("{}{} {}", words.empty() ? "" : " x ", html::escaped(axis),
                           html::escaped(degree.dump()));
    return words;
  }
  for (const json& axis : *found) {
    words += fmt::format("{}{} {}", words.empty() ? "" : " x ", html::text_of(axis, "axis"),
                         html::number_of(axis, "degree"));
  }
  return words;
}

/// Unique in the page, and a fragment of an address.
std::string anchor_of(std::string_view part, std::size_t index) {
  return fmt::format("{}-{}", part, index + 1);
}

std::string verdict_of(const json& item) {
  const std::string status = html::text_of(item, "status"),
                    strength = html::text_of(item, "strength");
  std::string html =
      fmt::format("<div class=\"verdict {0}\"><strong>{1}{2}</strong>\n<p>{3}</p>\n<dl>", status,
                  in_capitals(status), strength.empty() ? "" : fmt::format(" ({})", strength),
                  html::text_of(item, "reason"));
  const auto row = [&](const char* title, const std::string& text) {
    if (!text.empty()) html += fmt::format("<dt>{}</dt><dd>{}</dd>", title, text);
  };
  row("Subject", html::text_of(item, "subject"));
  row("Copies", html::text_of(item, "copy_of"));
  row("Mesh", mesh_of(item));
  row("Against", html::text_of(item, "reference"));
  row("Injected fault", html::text_of(item, "fault"));
  if (const json& detection = html::part_in(item, "detection"); detection.is_object()) {
    const std::string problem = html::text_of(detection, "problem");
    row("Detection", problem.empty() ? "found as the catalog says" : "missed: " + problem);
  }
  row("Not enough", html::text_of(item, "unmet"));
  row("Would miss", html::text_of(item, "would_miss"));
  row("Collectives", html::text_of(item, "collectives"));
  html += "</dl></div>\n";
  for (const json& note : html::list_of(item, "notes"))
    if (note.is_string())
      html += fmt::format("<p>{}</p>\n", html::escaped(note.get<std::string>()));
  return html;
}

std::string names_of(const json& item, const char* part, std::string_view title) {
  constexpr std::size_t kShown = 50;
  const json& names = html::list_of(item, part);
  if (names.empty()) return "";
  std::string html = fmt::format("<details><summary>{}: {}</summary><ul>\n", title, names.size());
  for (std::size_t i = 0; i < std::min(kShown, names.size()); ++i) {
    if (names[i].is_string())
      html += fmt::format("<li class=name>{}</li>\n", html::escaped(names[i].get<std::string>()));
  }
  if (names.size() > kShown) html += fmt::format("<li>{} more</li>", names.size() - kShown);
  return html + "</ul></details>\n";
}

/// Of the run that this case judged.
std::string times_of(const json& report, const std::string& name) {
  for (const json& item : html::list_of(report, "collective_times")) {
    if (html::text_of(item, "case") != name) continue;
    return html::collectives_of(
        html::list_of(item, "collectives"),
        "Of a step on the mean rank of this run; bytes are those of all ranks. Times include "
        "waiting for the other ranks, which also record and compare what they compute: isoshard "
        "bench times a run that does nothing else");
  }
  return "";
}

std::string case_html(const json& report, const json& item, std::size_t index, std::size_t room) {
  std::string name = html::text_of(item, "case");
  if (name.empty()) name = html::text_of(item, "experiment");
  std::string result =
      fmt::format("<section id={0} aria-labelledby={0}-title>\n<h2 id={0}-title>{1}</h2>\n",
                  anchor_of("case", index), name);
  if (item.contains("holds")) {
    result += fmt::format("<p class={}>{}</p><pre>{}</pre>\n",
                          item["holds"] == true ? "conforms" : "diverges",
                          item["holds"] == true ? "HOLDS" : "DOES NOT HOLD",
                          html::escaped(item.value("claims", json()).dump(1)));
    return result + "</section>\n";
  }
  result += verdict_of(item) + html::findings_of(item) + html::neighbors_of(item) +
            html::by_rank_of(item) + html::numbers_of(item) + html::map_of(item) +
            html::more_findings_of(item) + html::growth_of(item) + html::placements_of(item) +
            html::calls_of(item) + times_of(report, name) + html::schedule_of(item) +
            names_of(item, "missing", "Only the reference recorded") +
            names_of(item, "extra", "Only the run recorded") +
            names_of(item, "not_recorded", "Allowed to be missing");
  return result + html::tensors_of(item, room) + "</section>\n";
}

/// Names of tables for those who hear the page: each once in it.
std::string with_number(std::string html, std::size_t index, std::size_t all) {
  constexpr std::string_view kRegion = "role=region aria-label=\"";
  if (all < 2) return html;
  for (std::size_t at = html.find(kRegion); at != html.npos; at = html.find(kRegion, at)) {
    at += kRegion.size();
    html.insert(at, fmt::format("Part {}: ", index + 1));
  }
  return html;
}

std::string brief_html(const json& item, std::size_t index) {
  return fmt::format(
      "<section id={0} aria-labelledby={0}-title>\n<h2 id={0}-title>{1}</h2>\n{2}"
      "</section>\n",
      anchor_of("case", index), html::text_of(item, "case"), verdict_of(item));
}

std::string deviation_of(const json& item, const char* part, std::string_view title) {
  const auto found = item.find(part);
  if (found == item.end() || !found->is_object()) return "";
  return fmt::format("<p>{}: step {}, {}: reference {}, run {}, off by {}, allowed {} ({})</p>\n",
                     title, html::number_of(*found, "step"), html::text_of(*found, "number"),
                     html::short_number(html::number_of(*found, "reference")),
                     html::short_number(html::number_of(*found, "actual")),
                     html::short_number(html::number_of(*found, "deviation")),
                     html::short_number(html::number_of(*found, "allowed")),
                     html::text_of(*found, "rule"));
}

std::string curve_html(const json& item, std::size_t index) {
  std::string result =
      fmt::format("<section id={0} aria-labelledby={0}-title>\n<h2 id={0}-title>{1}</h2>\n",
                  anchor_of("curve", index), html::text_of(item, "case"));
  result += html::text_of(item, "status").empty()
                ? fmt::format("<p>A reference of {} steps, which nothing is compared with.</p>\n",
                              html::number_of(item, "steps"))
                : verdict_of(item);
  result += deviation_of(item, "first", "First number that is not allowed") +
            deviation_of(item, "largest", "Largest deviation");
  for (const json& remark : html::list_of(item, "remarks"))
    if (remark.is_string())
      result += fmt::format("<p>{}</p>\n", html::escaped(remark.get<std::string>()));
  return result + "</section>\n";
}

/// Its status; of a run that is to show that its fault is found, whether it was.
std::string status_of(const json& item) {
  if (item.contains("holds")) return item["holds"] == true ? "holds" : "does not hold";
  const json& detection = html::part_in(item, "detection");
  if (detection.is_object())
    return html::part_in(detection, "as_expected") == true ? "found" : "missed";
  return html::text_of(item, "status");
}

/// What colors it.
std::string class_of(const std::string& status) {
  if (status == "holds" || status == "found") return "conforms";
  if (status == "does not hold" || status == "missed" || status == "failed" ||
      status == "does not conform")
    return "diverges";
  return status;
}

/// How many parts of the report have each status, in the order in which they came up.
std::string counts_of(const json& report) {
  std::map<std::string, int> counts;
  for (const char* const part : {"cases", "curves", "goldens", "benchmarks"}) {
    for (const json& item : html::list_of(report, part)) {
      if (const std::string status = status_of(item); !status.empty()) ++counts[status];
    }
  }
  std::string words;
  for (const auto& [status, count] : counts)
    words += fmt::format("{}{} {}", words.empty() ? "" : ", ", count, status);
  return words.empty() ? "nothing was judged" : words;
}

std::string contents_of(const json& report) {
  std::string html;
  const auto add = [&](const char* part, const char* anchor, const char* name) {
    const json& items = html::list_of(report, part);
    for (std::size_t i = 0; i < items.size(); ++i) {
      const std::string status = status_of(items[i]);
      std::string title = html::text_of(items[i], name);
      if (title.empty()) title = html::text_of(items[i], "experiment");
      if (const std::string fault = html::text_of(items[i], "fault"); !fault.empty())
        title += " with " + fault;
      html += fmt::format(
          "<tr><th scope=row class=name><a href=\"#{}\">{}</a></th>"
          "<td class=\"name {}\">{}</td></tr>\n",
          anchor_of(anchor, i), title, class_of(status), status.empty() ? "compared with" : status);
    }
  };
  add("cases", "case", "case");
  add("curves", "curve", "case");
  add("goldens", "golden", "name");
  add("benchmarks", "benchmark", "name");
  if (html.empty()) return "";
  return "<table><caption>Parts of this report</caption><thead><tr><th scope=col class=name>part"
         "</th><th scope=col class=name>verdict</th></tr></thead><tbody>\n" +
         html + "</tbody></table>\n";
}

}  // namespace

std::string html_of(const json& report) {
  if (!report.is_object() || report.value("schema", json()) != kReportSchema ||
      !report.value("exit_code", json()).is_number_integer() ||
      !report.value("cases", json()).is_array()) {
    throw FileError(fmt::format(
        "a report must be a JSON object of schema {} with exit_code and cases, as report.json is",
        kReportSchema));
  }
  const json &cases = html::list_of(report, "cases"), &curves = html::list_of(report, "curves"),
             &goldens = html::list_of(report, "goldens"),
             &benchmarks = html::list_of(report, "benchmarks");
  std::string page = fmt::format(
      "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n<meta name=viewport "
      "content=\"width=device-width,initial-scale=1\">\n<title>isoshard: {0}</title>\n<style>{1}"
      "</style>\n</head>\n<body>\n<main>\n<h1>isoshard report: {0}</h1>\n",
      counts_of(report), html::style_sheet());
  page += html::hero_of(report);
  for (const json& note : html::list_of(report, "notes"))
    if (note.is_string())
      page += fmt::format("<p>{}</p>\n", html::escaped(note.get<std::string>()));
  page += contents_of(report);
  const std::size_t room = kRows / std::max<std::size_t>(cases.size(), 1);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    // Where the page has no room for all, cases that are as they should be are told in words.
    const bool is_brief = page.size() > kDetails && html::text_of(cases[i], "status") == "conforms";
    if (page.size() > kPage) {
      page += fmt::format("<p>{} more cases are left out; report.json has them.</p>\n",
                          cases.size() - i);
      break;
    }
    page += is_brief ? brief_html(cases[i], i)
                     : with_number(case_html(report, cases[i], i, room), i, cases.size());
  }
  page += html::curves_of(report);
  for (std::size_t i = 0; i < curves.size(); ++i) page += curve_html(curves[i], i);
  for (std::size_t i = 0; i < goldens.size(); ++i) {
    page += fmt::format(
        "<section id={0} aria-labelledby={0}-title><h2 id={0}-title>{1}</h2><pre>{2}</pre>"
        "</section>\n",
        anchor_of("golden", i), html::text_of(goldens[i], "name"),
        html::text_of(goldens[i], "text"));
  }
  for (std::size_t i = 0; i < benchmarks.size(); ++i) {
    page += fmt::format(
        "<section id={0} aria-labelledby={0}-title><h2 id={0}-title>{1}</h2>{2}</section>\n",
        anchor_of("benchmark", i), html::text_of(benchmarks[i], "name"),
        html::benchmark_of(benchmarks[i]));
  }
  page += html::provenance_of(report);
  return page + "</main>\n</body>\n</html>\n";
}

}  // namespace isoshard
