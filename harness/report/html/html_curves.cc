// SPDX-License-Identifier: Apache-2.0
// Two charts and their numbers.
#include "harness/report/html/html_curves.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "harness/report/html/html_text.h"

namespace isoshard::html {
namespace {

using nlohmann::json;

constexpr double kChartWidth = 900, kChartHeight = 260, kChartLeft = 76, kChartTop = 14,
                 kChartBottom = 34;
constexpr std::size_t kMostCurves = 8;  // as many as there are colors

struct Line {
  std::string name, title;
  std::vector<double> steps, loss, allowed, spread;
};

std::vector<Line> lines_of(const json& report) {
  std::vector<Line> lines;
  for (const json& curve : list_of(report, "curves")) {
    const json& points = part_in(curve, "points");
    Line line{text_of(curve, "case"),        text_of(curve, "title"),
              numbers_in(points, "steps"),   numbers_in(points, "loss"),
              numbers_in(points, "allowed"), numbers_in(points, "spread")};
    if (line.title.empty()) line.title = line.name;
    if (!line.steps.empty() && line.steps.size() == line.loss.size())
      lines.push_back(std::move(line));
  }
  if (lines.size() > kMostCurves) lines.resize(kMostCurves);
  // two of one title cannot be told apart by it
  std::map<std::string, int> times;
  for (const Line& line : lines) ++times[line.title];
  for (Line& line : lines)
    if (times[line.title] > 1 && line.title != line.name) line.title += ": " + line.name;
  return lines;
}

/// From numbers to places of a chart.
struct Axes {
  double first = 0, last = 1, low = 0, high = 1;
  bool is_log = false;

  [[nodiscard]] double x(double step) const {
    return kChartLeft +
           (last > first ? (step - first) / (last - first) : 0.5) * (kChartWidth - kChartLeft - 12);
  }
  [[nodiscard]] double y(double value) const {
    const double own = is_log ? (value > 0 ? std::log10(value) : low) : value;
    const double part = high > low ? (own - low) / (high - low) : 0.5;
    return kChartHeight - kChartBottom -
           std::clamp(part, 0.0, 1.0) * (kChartHeight - kChartBottom - kChartTop);
  }
  [[nodiscard]] std::string points(const std::vector<double>& steps,
                                   const std::vector<double>& values) const {
    std::string text;
    for (std::size_t i = 0; i < std::min(steps.size(), values.size()); ++i)
      if (std::isfinite(values[i]))
        text += fmt::format("{:.1f},{:.1f} ", x(steps[i]), y(values[i]));
    return text;
  }
};

void widen(Axes& axes, const std::vector<double>& values, bool& any) {
  for (const double value : values) {
    if (!std::isfinite(value) || (axes.is_log && !(value > 0))) continue;
    const double own = axes.is_log ? std::log10(value) : value;
    axes.low = any ? std::min(axes.low, own) : own;
    axes.high = any ? std::max(axes.high, own) : own;
    any = true;
  }
}

std::string grid_of(const Axes& axes, const char* unit) {
  std::string html;
  const double step = axes.is_log ? std::max(1.0, std::ceil((axes.high - axes.low) / 5))
                                  : (axes.high - axes.low) / 4;
  if (!(step > 0)) return html;
  for (double value = axes.low; value <= axes.high + step / 1e6; value += step) {
    const double y = axes.y(axes.is_log ? std::pow(10, value) : value);
    html += fmt::format(
        "<line x1={} x2={} y1={:.1f} y2={:.1f} class=grid /><text x=8 y={:.1f}>{}</text>",
        kChartLeft, kChartWidth - 12, y, y, y + 4,
        axes.is_log ? fmt::format("1e{:.0f}", value) : fmt::format("{:.4g}", value));
  }
  return html + fmt::format("<text x={} y={}>step {:.0f} to {:.0f}; {}</text>", kChartLeft,
                            kChartHeight - 10, axes.first, axes.last, unit);
}

std::string legend_of(const std::vector<Line>& lines, std::size_t from, const char* more) {
  std::string html = "<ul class=legend>";
  for (std::size_t i = from; i < lines.size(); ++i)
    html += fmt::format(
        "<li><svg viewBox=\"0 0 24 8\" width=24 height=8 aria-hidden=true><line x1=0 "
        "x2=24 y1=4 y2=4 class=\"line l{}\"/></svg> {}</li>",
        i, lines[i].title);
  return html + more + "</ul>\n";
}

std::string chart(const std::string& drawn, const std::string& label) {
  return fmt::format(
      "<svg viewBox=\"0 0 {0} {1}\" width={0} height={1} role=img aria-label=\"{2}\">{3}</svg>\n",
      kChartWidth, kChartHeight, label, drawn);
}

Axes axes_over(const std::vector<Line>& lines, bool is_log) {
  Axes axes{.first = lines[0].steps.front(), .last = lines[0].steps.back(), .is_log = is_log};
  for (const Line& line : lines) {
    axes.first = std::min(axes.first, line.steps.front());
    axes.last = std::max(axes.last, line.steps.back());
  }
  return axes;
}

std::string losses_of(const std::vector<Line>& lines) {
  Axes axes = axes_over(lines, false);
  bool any = false;
  for (const Line& line : lines) widen(axes, line.loss, any);
  std::string drawn = grid_of(axes, "loss of the global batch");
  const Line& reference = lines[0];
  for (const Line& line : lines) {  // what is allowed, around the reference
    if (line.allowed.empty() || line.allowed.size() > reference.loss.size()) continue;
    std::string band, back;
    for (std::size_t i = 0; i < line.allowed.size(); ++i) {
      const double x = axes.x(reference.steps[i]);
      band += fmt::format("{:.1f},{:.1f} ", x, axes.y(reference.loss[i] + line.allowed[i]));
      back = fmt::format("{:.1f},{:.1f} ", x, axes.y(reference.loss[i] - line.allowed[i])) + back;
    }
    drawn += fmt::format("<polygon points=\"{}{}\" class=band />", band, back);
    break;
  }
  for (std::size_t i = 0; i < lines.size(); ++i)
    drawn += fmt::format("<polyline points=\"{}\" class=\"line l{}\"/>",
                         axes.points(lines[i].steps, lines[i].loss), i);
  return chart(drawn, fmt::format("Loss of {} runs over {:.0f} steps; the table below has numbers",
                                  lines.size(), axes.last + 1)) +
         legend_of(lines, 0, "<li>gray band: what is allowed around the first run</li>");
}

std::string distances_of(const std::vector<Line>& lines) {
  const Line& reference = lines[0];
  std::vector<std::vector<double>> distances(lines.size());
  Axes axes = axes_over(lines, true);
  bool any = false;
  for (std::size_t i = 1; i < lines.size(); ++i) {
    if (lines[i].steps != reference.steps) continue;
    for (std::size_t s = 0; s < reference.steps.size(); ++s)
      distances[i].push_back(std::fabs(lines[i].loss[s] - reference.loss[s]));
    widen(axes, distances[i], any);
    widen(axes, lines[i].allowed, any);
  }
  widen(axes, reference.spread, any);
  if (!any) return "";
  axes.low = std::floor(axes.low);
  axes.high = std::ceil(axes.high);
  std::string drawn = grid_of(axes, "distance of the loss from the first run, logarithmic");
  if (!reference.spread.empty())
    drawn += fmt::format("<polyline points=\"{}\" class=spread />",
                         axes.points(reference.steps, reference.spread));
  for (std::size_t i = 1; i < lines.size(); ++i) {
    drawn += fmt::format("<polyline points=\"{}\" class=\"allowed l{}\"/>",
                         axes.points(lines[i].steps, lines[i].allowed), i);
    drawn += fmt::format("<polyline points=\"{}\" class=\"line l{}\"/>",
                         axes.points(reference.steps, distances[i]), i);
  }
  return "<h3>Distance from the first run</h3>\n" +
         chart(drawn, "Distance of each run's loss from the first run, and what is allowed") +
         legend_of(lines, 1,
                   "<li>dashed: what is allowed of it</li><li>dotted: runs whose weights differ by "
                   "one ulp</li>");
}

std::string table_of_lines(const std::vector<Line>& lines) {
  constexpr std::size_t kRows = 25;
  const Line& reference = lines[0];
  std::string html = "<details><summary>The numbers</summary>\n" +
                     begin_table("Loss of the global batch, of at most 25 steps") +
                     "<thead><tr><th scope=col>step</th>";
  for (const Line& line : lines) html += fmt::format("<th scope=col>{}</th>", line.title);
  html += "</tr></thead><tbody>\n";
  const std::size_t stride = std::max<std::size_t>(1, (reference.steps.size() + kRows - 1) / kRows);
  for (std::size_t s = 0; s < reference.steps.size(); s += stride) {
    html += fmt::format("<tr><th scope=row>{:.0f}</th>", reference.steps[s]);
    for (const Line& line : lines)
      html += s < line.loss.size() ? fmt::format("<td>{:.9g}</td>", line.loss[s]) : "<td>-</td>";
    html += "</tr>\n";
  }
  html += end_table();
  return html + "</details>\n";
}

}  // namespace

std::string curves_of(const json& report) {
  const std::vector<Line> lines = lines_of(report);
  if (lines.empty()) return "";
  const std::size_t all = list_of(report, "curves").size();
  std::string html = "<section aria-labelledby=losses><h2 id=losses>Loss curves</h2>\n";
  if (all > lines.size())
    html += fmt::format("<p>The first {} of {} curves.</p>\n", lines.size(), all);
  html += losses_of(lines);
  if (lines.size() > 1) html += distances_of(lines);
  return html + table_of_lines(lines) + "</section>\n";
}

}  // namespace isoshard::html
