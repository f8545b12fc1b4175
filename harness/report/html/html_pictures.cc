// SPDX-License-Identifier: Apache-2.0
// Who holds what, and schedules, drawn.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/mesh/mesh_words.h"
#include "harness/report/html/html_evidence.h"
#include "harness/report/html/html_text.h"

namespace isoshard::html {
namespace {

using nlohmann::json;

constexpr double kPictureWidth = 200, kPictureHeight = 90;
constexpr int kPalette = 8;  ///< p0 to p7 of the style sheet

/// Parts at the same place, which are copies of each other (or addends).
struct Held {
  std::vector<double> begin, size;
  std::vector<int> ranks;
};

std::vector<Held> held_of(const json& tensor) {
  std::vector<Held> all;
  for (const json& part : list_of(tensor, "parts")) {
    Held held{numbers_in(part, "begin"), numbers_in(part, "size"), {}};
    const auto same = std::ranges::find_if(all, [&](const Held& other) {
      return other.begin == held.begin && other.size == held.size;
    });
    Held& place = same == all.end() ? all.emplace_back(std::move(held)) : *same;
    const int rank = static_cast<int>(number_of(part, "rank"));
    if (std::ranges::find(place.ranks, rank) == place.ranks.end()) place.ranks.push_back(rank);
  }
  return all;
}

/// The shape that parts lie in: of flat layouts that of the flattened tensor.
std::vector<double> space_of(const json& tensor) {
  std::vector<double> shape = numbers_in(tensor, "shape");
  if (part_in(tensor, "flat") != true) return shape;
  double numel = 1;
  for (const double size : shape) numel *= size;
  return {numel};
}

/// Two dimensions that are cut, as far as there are so many: down and across.
std::array<std::size_t, 2> drawn_dims(const std::vector<double>& space,
                                      const std::vector<Held>& parts) {
  std::vector<std::size_t> cut;
  for (std::size_t d = 0; d < space.size(); ++d) {
    const bool is_cut = std::ranges::any_of(
        parts, [&](const Held& part) { return d < part.size.size() && part.size[d] < space[d]; });
    if (is_cut) cut.push_back(d);
  }
  if (cut.size() > 1) return {cut[0], cut[1]};
  const std::size_t last = space.empty() ? 0 : space.size() - 1;
  if (space.size() < 2) return {space.size(), 0};  // a line: across
  if (cut.empty() || cut[0] != last) return {cut.empty() ? 0 : cut[0], last};
  return {0, last};
}

std::string part_in_words(const Held& part) {
  std::string words = words_of_ranks(part.ranks) + ":";
  for (std::size_t d = 0; d < part.begin.size() && d < part.size.size(); ++d)
    words += fmt::format("{} {:.0f} to {:.0f}", d == 0 ? "" : ",", part.begin[d],
                         part.begin[d] + part.size[d] - 1);
  return words;
}

std::string picture_of(const json& tensor) {
  const std::vector<Held> parts = held_of(tensor);
  const std::vector<double> space = space_of(tensor);
  if (parts.empty()) return "";
  const auto [down, across] = drawn_dims(space, parts);
  const auto range = [&](const Held& part, std::size_t dim, double room) {
    if (dim >= space.size() || dim >= part.begin.size() || !(space[dim] > 0))
      return std::pair(0.0, room);
    return std::pair(part.begin[dim] / space[dim] * room, part.size[dim] / space[dim] * room);
  };
  std::string words, drawn;
  for (const Held& part : parts) {
    const auto [x, width] = range(part, across, kPictureWidth);
    const auto [y, height] = range(part, down, kPictureHeight);
    const std::string ranks = ranges_in_words(part.ranks);
    if (words.size() < 600) words += (words.empty() ? "" : "; ") + part_in_words(part);
    drawn += fmt::format("<rect x={:.1f} y={:.1f} width={:.1f} height={:.1f} class=p{} />", x, y,
                         width, height, part.ranks.front() % kPalette);
    if (height >= 12 && width >= 7.0 * static_cast<double>(ranks.size()))
      drawn += fmt::format("<text x={:.1f} y={:.1f}>{}</text>", x + 4, y + height / 2 + 4, ranks);
  }
  std::string shape;
  for (const double size : numbers_in(tensor, "shape"))
    shape += fmt::format("{}{:.0f}", shape.empty() ? "" : " x ", size);
  return fmt::format(
      "<figure><svg viewBox=\"0 0 {0} {1}\" width={0} height={1} role=img aria-label=\"{2}\">{3}"
      "</svg><figcaption><span class=name>{4}</span><br>{5}, {6}; {7}{8}</figcaption></figure>\n",
      kPictureWidth, kPictureHeight, words, drawn, text_of(tensor, "name"), text_of(tensor, "kind"),
      shape, text_of(tensor, "placement"), part_in(tensor, "cut") == true ? "; not all parts" : "");
}

}  // namespace

std::string placements_of(const json& item) {
  const json& evidence = part_in(item, "evidence");
  const json &placements = list_of(evidence, "placements"), &around = list_of(evidence, "around"),
             &findings = list_of(item, "findings");
  std::string html;
  if (!findings.empty()) {
    for (const json& held : around)
      if (is_same_tensor(held, findings[0])) html += picture_of(held);
    if (!html.empty())
      html = "<h3>Who holds the tensor that diverges first</h3>\n<div class=pictures>\n" + html +
             "</div>\n";
  }
  if (placements.empty()) return html;
  html += fmt::format(
      "<details><summary>Who holds what: {} kinds of tensors</summary>\n<p>One tensor of each "
      "kind, of its first layer. The numbers in a part are the ranks that hold it.</p>\n"
      "<div class=pictures>\n",
      placements.size());
  for (const json& held : placements) html += picture_of(held);
  return html + "</div>\n</details>\n";
}

std::string schedule_of(const json& item) {
  const json& actions = list_of(item, "schedule");
  if (actions.empty()) return "";
  constexpr double kLane = 26, kLeft = 60, kFull = 900, kAxis = 22;
  double end = 1, busy = 0;
  int lanes = 1;
  for (const json& action : actions) {
    end = std::max(end, number_of(action, "end"));
    lanes = std::clamp(static_cast<int>(number_of(action, "rank")) + 1, lanes, 64);
    busy += number_of(action, "end") - number_of(action, "start");
  }
  const double unit = (kFull - kLeft - 8) / end, height = kLane * lanes + kAxis;
  const double idle = 100 * (1 - busy / (end * lanes));
  std::string drawn;
  for (int lane = 0; lane < lanes; ++lane) {
    drawn += fmt::format("<text x=8 y={:.0f}>pp {}</text>", kLane * lane + 18, lane);
  }
  std::map<int, std::string> order;
  constexpr std::size_t kMost = 4000;
  for (std::size_t i = 0; i < std::min(actions.size(), kMost); ++i) {
    const json& action = actions[i];
    const std::string label = text_of(action, "label");
    const int rank = static_cast<int>(number_of(action, "rank"));
    const double x = kLeft + unit * number_of(action, "start"),
                 width = unit * (number_of(action, "end") - number_of(action, "start"));
    const char kind = label.find('F') != label.npos   ? '0'
                      : label.find('W') != label.npos ? '2'
                                                      : '1';
    drawn += fmt::format("<rect x={:.1f} y={:.1f} width={:.1f} height={} class=p{} />", x,
                         kLane * rank + 2, width, kLane - 4, kind);
    if (width >= 7.0 * static_cast<double>(label.size()))
      drawn += fmt::format("<text x={:.1f} y={:.1f}>{}</text>", x + 2, kLane * rank + 18, label);
    if (order[rank].size() < 400) order[rank] += " " + label;
  }
  std::string rows;
  for (const auto& [rank, labels] : order)
    rows += fmt::format("<tr><th scope=row>pp {}</th><td class=name>{}</td></tr>\n", rank, labels);
  return fmt::format(
      "<h3>Schedule of the pipeline</h3>\n<p>As it runs with equal stages, a backward as long as "
      "two forwards and no time for transfers: ranks are idle for {:.0f} % of the time. F: "
      "forward, "
      "B: backward, I and W: its halves; the number is that of the micro-batch.</p>\n"
      "<svg viewBox=\"0 0 {} {:.0f}\" width={} height={:.0f} role=img aria-label=\"Schedule of {} "
      "pipeline ranks; the table below has the same order\">{}<text x={} y={:.0f}>time, in "
      "forwards: 0 to {:.0f}</text></svg>\n<details><summary>The same as a table</summary>{}"
      "<tbody>{}</tbody>{}</details>\n",
      idle, kFull, height, kFull, height, lanes, drawn, kLeft, height - 6, end,
      begin_table("Actions of each pipeline rank, in order"), rows, end_table());
}

}  // namespace isoshard::html
