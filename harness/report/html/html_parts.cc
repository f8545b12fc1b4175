// SPDX-License-Identifier: Apache-2.0
// Tables and pictures of one case.
#include "harness/report/html/html_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "harness/report/html/html_text.h"

namespace isoshard::html {
namespace {

using nlohmann::json;

/// "0 %" for equal bits, "15 %", "over": never a color alone.
std::string share_in_words(double share) {
  if (share == 0) return "equal";
  if (!(share <= 1)) return std::isfinite(share) ? fmt::format("{:.3g} x", share) : "over";
  return share < 0.005 ? "&lt; 1 %" : fmt::format("{:.0f} %", share * 100);
}

std::string ranks_in_words(const json& finding) {
  std::string words;
  for (const json& rank : list_of(finding, "ranks"))
    words += (words.empty() ? "" : ", ") + escaped(rank.dump());
  return words.empty() ? "all" : words;
}

std::string finding_html(const json& finding, bool is_first) {
  std::string html =
      fmt::format("<p>{}<span class=name>{}</span> ({}, step {}): {}</p>\n<dl>",
                  is_first ? "First: " : "", text_of(finding, "name"), text_of(finding, "stage"),
                  number_of(finding, "step"), text_of(finding, "what"));
  const auto row = [&](const char* title, const std::string& text) {
    if (!text.empty()) html += fmt::format("<dt>{}</dt><dd>{}</dd>", title, text);
  };
  row("Likely cause", text_of(finding, "diagnosis"));
  row("Evidence", text_of(finding, "evidence"));
  row("Ranks", ranks_in_words(finding));
  row("Called at", text_of(finding, "call_site"));
  std::string ids = text_of(part_in(finding, "finding"), "id");
  if (const std::string cause = text_of(part_in(finding, "cause"), "id"); !cause.empty())
    ids += (ids.empty() ? "" : ", ") + cause;
  row("Ids", ids);
  return html + "</dl>\n";
}

std::string row_of_tensor(const json& tensor, bool is_marked) {
  const double share = share_of_allowed(tensor);
  std::string html = fmt::format(
      "<tr{}><th scope=row class=name>{}</th><td class=name>{}</td><td>{}</td>"
      "<td class={}>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
      is_marked ? " class=here" : "", text_of(tensor, "name"), text_of(tensor, "stage"),
      number_of(tensor, "step"), class_of_share(share), share_in_words(share),
      short_number(number_of(tensor, "relative_error")),
      short_number(number_of(tensor, "allowed_relative_error")),
      short_number(number_of(tensor, "unequal")));
  const json &reference = list_of(tensor, "reference_values"),
             &actual = list_of(tensor, "actual_values");
  if (number_of(tensor, "nonfinite_mismatch") > 0) {
    html +=
        "<tr><td colspan=7 class=name>NaN or infinity on one side: the numbers are those of the "
        "other elements</td></tr>\n";
  }
  if (!reference.empty() && number_of(tensor, "unequal") > 0) {
    html += fmt::format("<tr><td colspan=7 class=name>reference {}, run {}</td></tr>\n",
                        escaped(reference.dump()), escaped(actual.dump()));
  }
  return html;
}

std::string table_of(const std::vector<const json*>& tensors, const json* marked,
                     const std::string& caption) {
  std::string html =
      begin_table(caption) +
      "<thead><tr><th scope=col class=name>tensor</th><th scope=col class=name>stage</th>"
      "<th scope=col>step</th><th scope=col>of what is allowed</th>"
      "<th scope=col>relative error</th><th scope=col>allowed</th>"
      "<th scope=col>unequal elements</th></tr></thead><tbody>\n";
  for (const json* const tensor : tensors) html += row_of_tensor(*tensor, tensor == marked);
  html += end_table();
  return html;
}

struct Point {
  double error, allowed;
  bool is_within;
};

}  // namespace

std::string findings_of(const json& item) {
  const json& findings = list_of(item, "findings");
  if (findings.empty()) return "";
  return "<h3>What is wrong</h3>\n" + finding_html(findings[0], true);
}

std::string more_findings_of(const json& item) {
  constexpr std::size_t kShown = 20;
  const json& findings = list_of(item, "findings");
  if (findings.size() < 2) return "";
  std::string html =
      fmt::format("<details><summary>{} more findings</summary>\n", findings.size() - 1);
  for (std::size_t i = 1; i < std::min(findings.size(), kShown); ++i)
    html += finding_html(findings[i], false);
  if (findings.size() > kShown)
    html += fmt::format("<p>{} are left out.</p>\n", findings.size() - kShown);
  return html + "</details>\n";
}

std::string neighbors_of(const json& item) {
  constexpr std::ptrdiff_t kEachSide = 4;
  const json &findings = list_of(item, "findings"), &tensors = list_of(item, "tensors");
  if (findings.empty()) return "";
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const json& tensor) {
    return is_same_tensor(tensor, findings[0]);
  });
  if (found == tensors.end()) return "";
  std::vector<const json*> near;
  for (auto tensor = found - std::min(kEachSide, found - tensors.begin());
       tensor != tensors.end() && tensor - found <= kEachSide; ++tensor) {
    near.push_back(&*tensor);
  }
  return table_of(near, &*found, "Around the first divergence, in the order of a step");
}

std::string map_of(const json& item) {
  struct Cell {
    double share = 0;
    std::string tensor;
  };
  std::vector<std::string> stages, rows;
  std::map<std::pair<std::string, std::string>, Cell> cells;
  const auto note = [](std::vector<std::string>& known, const std::string& word) {
    if (std::find(known.begin(), known.end(), word) == known.end()) known.push_back(word);
  };
  for (const json& tensor : list_of(item, "tensors")) {
    const std::string stage = text_of(tensor, "stage"), row = row_of(tensor);
    note(stages, stage);
    note(rows, row);
    const auto [cell, is_new] = cells.try_emplace({row, stage});
    const double share = share_of_allowed(tensor);
    if (is_new || !(share <= cell->second.share)) cell->second = {share, text_of(tensor, "name")};
  }
  if (rows.empty()) return "";
  // As the model has them: before, layers by number, after, whole step.
  const auto place = [](const std::string& row) {
    long number = 0;
    if (row.starts_with("layer ")) {
      std::from_chars(row.data() + 6, row.data() + row.size(), number);
      return std::pair(1, number);
    }
    return std::pair(row.starts_with("before") ? 0 : row.starts_with("after") ? 2 : 3, 0L);
  };
  std::ranges::stable_sort(rows, {}, place);
  std::string first_row, first_stage;
  if (const json& findings = list_of(item, "findings"); !findings.empty()) {
    first_row = row_of(findings[0]);
    first_stage = text_of(findings[0], "stage");
  }
  std::string html =
      "<h3>Where the allowed error is used</h3>\n<div class=scroll tabindex=0 role=region "
      "aria-label=\"Use of the allowed error by layer and stage\"><table><caption>Largest use in "
      "each layer and stage, stages in the order of a step. Framed: where the run first diverges."
      "</caption><thead><tr><td></td>";
  for (const std::string& stage : stages) html += fmt::format("<th scope=col>{}</th>", stage);
  html += "</tr></thead><tbody>\n";
  for (const std::string& row : rows) {
    html += fmt::format("<tr><th scope=row>{}</th>", row);
    for (const std::string& stage : stages) {
      const auto cell = cells.find({row, stage});
      if (cell == cells.end()) {
        html += "<td>-</td>";
        continue;
      }
      const bool is_first = row == first_row && stage == first_stage;
      html += fmt::format("<td class=\"{}{}\" title=\"{}\">{}</td>",
                          class_of_share(cell->second.share), is_first ? " here" : "",
                          cell->second.tensor, share_in_words(cell->second.share));
    }
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

std::string growth_of(const json& item) {
  constexpr double kWidth = 900, kHeight = 220, kLeft = 70, kTop = 12, kBottom = 34;
  std::vector<Point> points;
  double least = 1, most = 1e-300;
  bool has_zero = false;
  for (const json& tensor : list_of(item, "tensors")) {
    if (text_of(tensor, "kind") != "activation" || number_of(tensor, "step") != 0) continue;
    const bool has_nan = number_of(tensor, "nonfinite_mismatch") > 0;  // drawn at the top
    const Point point{
        has_nan ? std::numeric_limits<double>::infinity() : number_of(tensor, "relative_error"),
        number_of(tensor, "allowed_relative_error"), tensor.value("within", false)};
    points.push_back(point);
    has_zero = has_zero || point.error == 0;
    for (const double value : {point.error, point.allowed}) {
      if (!(value > 0) || !std::isfinite(value)) continue;
      least = std::min(least, value);
      most = std::max(most, value);
    }
  }
  if (points.size() < 2 || !(most > least)) return "";
  const double low = std::floor(std::log10(least)), high = std::ceil(std::log10(most));
  const double bottom = has_zero ? low - 1 : low;  // no power of ten is 0: it has a line of its own
  const double step = (kWidth - kLeft - 10) / static_cast<double>(points.size() - 1);
  const auto y_of = [&](double value) {
    if (std::isinf(value)) return kTop;
    const double part = value > 0 ? (std::log10(value) - bottom) / (high - bottom) : 0;
    return kHeight - kBottom - std::clamp(part, 0.0, 1.0) * (kHeight - kBottom - kTop);
  };
  std::string allowed, errors, wrong;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const double x = kLeft + step * static_cast<double>(i);
    if (points[i].allowed > 0) allowed += fmt::format("{:.1f},{:.1f} ", x, y_of(points[i].allowed));
    errors += fmt::format("{:.1f},{:.1f} ", x, y_of(points[i].error));
    if (!points[i].is_within) {
      wrong += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"#d1242f\"/>", x,
                           y_of(points[i].error));
    }
  }
  std::string html = fmt::format(
      "<h3>Error over the forward pass</h3>\n<svg viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" role=img aria-label=\"Relative error of {2} activations in the order of the "
      "forward pass; the map above has the numbers\">",
      kWidth, kHeight, points.size());
  const auto add_line = [&](double value, const std::string& label) {
    const double y = y_of(value);
    html += fmt::format(
        "<line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" stroke=\"currentColor\" "
        "opacity=\".2\"/><text x=\"8\" y=\"{3:.1f}\">{4}</text>",
        kLeft, kWidth - 10, y, y + 4, label);
  };
  if (has_zero) add_line(0, "0");
  for (double power = low; power <= high; power += std::max(1.0, std::floor((high - low) / 4)))
    add_line(std::pow(10, power), fmt::format("1e{:.0f}", power));
  html += fmt::format(
      "<polyline points=\"{}\" fill=\"none\" stroke=\"currentColor\" stroke-dasharray=\"5 4\" "
      "opacity=\".6\"/><polyline points=\"{}\" fill=\"none\" stroke=\"#0969da\" "
      "stroke-width=\"2\"/>{}",
      allowed, errors, wrong);
  return html +
         fmt::format(
             "<text x=\"{}\" y=\"{}\">activations, first to last: line: error; dashed: allowed; "
             "dots: diverge</text></svg>\n",
             kLeft, kHeight - 10);
}

std::string tensors_of(const json& item, std::size_t room) {
  std::vector<const json*> tensors;
  for (const json& tensor : list_of(item, "tensors")) tensors.push_back(&tensor);
  if (tensors.empty()) return "";
  std::ranges::stable_sort(tensors, std::greater(),
                           [](const json* tensor) { return share_of_allowed(*tensor); });
  const std::size_t shown = std::min(room, tensors.size());
  const std::size_t left_out = tensors.size() - shown;
  tensors.resize(shown);
  std::string html =
      fmt::format("<details><summary>{} tensors were compared</summary>\n", shown + left_out);
  html += table_of(tensors, nullptr, "Those that use most of what is allowed come first");
  if (left_out > 0)
    html += fmt::format("<p>{} tensors that use less are left out; report.json has them.</p>\n",
                        left_out);
  return html + "</details>\n";
}

}  // namespace isoshard::html
