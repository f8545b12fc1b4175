// SPDX-License-Identifier: Apache-2.0
// Tables by rank, numbers side by side, calls.
#include "harness/report/html/html_evidence.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "core/mesh/mesh_words.h"
#include "harness/report/html/html_text.h"

namespace isoshard::html {
namespace {

using nlohmann::json;

constexpr std::size_t kMostColumns = 16;

/// Error of a rank's parts of a tensor together: the largest of them.
struct RankError {
  bool holds = false, compared = false, differs = false;
  double error = 0;
};

std::map<int, RankError> errors_of(const json& held) {
  std::map<int, RankError> errors;
  for (const json& part : list_of(held, "parts")) {
    RankError& error = errors[static_cast<int>(number_of(part, "rank"))];
    error.holds = true;
    error.compared = error.compared || number_of(part, "compared") > 0;
    error.differs = error.differs || number_of(part, "unequal") > 0;
    const double own = number_of(part, "relative_error");
    if (!(own <= error.error)) error.error = own;
  }
  return errors;
}

const json* tensor_of(const json& item, const json& held) {
  const json& tensors = list_of(item, "tensors");
  const auto found = std::ranges::find_if(
      tensors, [&](const json& tensor) { return is_same_tensor(tensor, held); });
  return found == tensors.end() ? nullptr : &*found;
}

std::string cell_of(const RankError* error, double allowed) {
  if (error == nullptr || !error->holds) return "<td>-</td>";
  if (!error->compared) return "<td>not alone</td>";
  if (!error->differs) return "<td class=s0>equal</td>";
  const double share = allowed > 0 ? error->error / allowed : HUGE_VAL;
  return fmt::format("<td class={}>{}</td>", class_of_share(share),
                     error->error > 0 ? short_number(error->error) : "differs");
}

std::string cell_of_number(const json& number, const json& reference) {
  if (number.is_null()) return "<td class=none>.</td>";
  const auto words = [](const json& value) {
    return value.is_number() ? fmt::format("{:.5g}", value.get<double>())
                             : (value.is_string() ? escaped(value.get<std::string>()) : "?");
  };
  if (reference.is_null() || number == reference) return fmt::format("<td>{}</td>", words(number));
  return fmt::format("<td class=off>{}</td>", words(number));
}

/// "all_reduce (grad_reduce) 3 x 4.1 KB".
std::string call_in_words(const json& run) {
  const double bytes = number_of(run, "bytes"), repeat = number_of(run, "repeat");
  std::string size = fmt::format("{:.0f} B", bytes);
  if (bytes >= 1e6)
    size = fmt::format("{:.1f} MB", bytes / 1e6);
  else if (bytes >= 1e3)
    size = fmt::format("{:.1f} kB", bytes / 1e3);
  return fmt::format("{} <small>{}</small> {}{}", text_of(run, "op"), text_of(run, "purpose"),
                     repeat > 1 ? fmt::format("{:.0f} x ", repeat) : "", size);
}

}  // namespace

std::string rank_in_words(const json& item, int rank) {
  return escaped(parts::rank_in_words(item, rank));
}

std::string by_rank_of(const json& item) {
  const json &around = list_of(part_in(item, "evidence"), "around"),
             &findings = list_of(item, "findings");
  if (around.empty() || findings.empty()) return "";
  std::set<int> ranks, wrong;
  for (const json& held : around) {
    for (const auto& [rank, error] : errors_of(held)) {
      ranks.insert(rank);
      if (error.differs) wrong.insert(rank);
    }
  }
  std::vector<int> shown(ranks.begin(), ranks.end());
  std::string left_out;
  if (shown.size() > kMostColumns) {  // those that differ, as far as there is room
    std::ranges::stable_partition(shown, [&](int rank) { return wrong.contains(rank); });
    left_out = fmt::format("<p>{} of {} ranks are left out, those that differ last.</p>\n",
                           shown.size() - kMostColumns, shown.size());
    shown.resize(kMostColumns);
    std::ranges::sort(shown);
  }
  if (shown.empty()) return "";
  std::string html = begin_table(
      "Each rank's relative error around the first divergence, in the order of a step. Framed: "
      "the first tensor that diverges; -: the rank holds nothing of it; not alone: only the sum "
      "over ranks can be compared");
  html += "<thead><tr><th scope=col class=name>tensor</th><th scope=col class=name>stage</th>";
  for (const int rank : shown)
    html += fmt::format("<th scope=col>{}</th>", rank_in_words(item, rank));
  html += "</tr></thead><tbody>\n";
  for (const json& held : around) {
    const json* const tensor = tensor_of(item, held);
    const double allowed = tensor == nullptr ? 0 : number_of(*tensor, "allowed_relative_error");
    const std::map<int, RankError> errors = errors_of(held);
    html += fmt::format("<tr{}><th scope=row class=name>{}</th><td class=name>{}</td>",
                        is_same_tensor(held, findings[0]) ? " class=here" : "",
                        text_of(held, "name"), text_of(held, "stage"));
    for (const int rank : shown) {
      const auto error = errors.find(rank);
      html += cell_of(error == errors.end() ? nullptr : &error->second, allowed);
    }
    html += "</tr>\n";
  }
  return "<h3>By rank</h3>\n" + html + end_table() + left_out;
}

std::string numbers_of(const json& item) {
  const json& numbers = part_in(part_in(item, "evidence"), "numbers");
  const json& sides = list_of(numbers, "sides");
  if (sides.size() < 2) return "";
  const json& reference = list_of(sides[0], "rows");
  const double row = number_of(numbers, "row"), column = number_of(numbers, "column");
  std::string shape;
  for (const json& size : list_of(numbers, "shape"))
    shape += (shape.empty() ? "" : " x ") + escaped(size.dump());
  const bool is_whole = part_in(numbers, "whole") == true,
             are_summands = part_in(numbers, "summands") == true;
  std::string html = fmt::format(
      "<h3>The numbers side by side</h3>\n<p>{} of <span class=name>{}</span> ({}), {}. Numbers "
      "that differ from the reference's are <span class=off>underlined</span>; a dot: the rank "
      "does not hold this element.{}</p>\n<div class=sides>\n",
      is_whole ? "All" : "A corner", text_of(numbers, "name"), shape,
      is_whole ? "all numbers" : "around the first element that differs",
      are_summands ? " Ranks hold addends: their sum is to be the reference's number." : "");
  for (const json& side : sides) {
    const json& rank = part_in(side, "rank");
    const bool is_reference = !rank.is_number();
    const std::string who =
        is_reference ? "reference (one process)" : rank_in_words(item, rank.get<int>());
    html += begin_table(who) + "<thead><tr><td></td>";
    const json& rows = list_of(side, "rows");
    const std::size_t width = rows.empty() ? 0 : rows[0].size();
    for (std::size_t c = 0; c < width; ++c)
      html += fmt::format("<th scope=col>[{:.0f}]</th>", column + static_cast<double>(c));
    html += "</tr></thead><tbody>\n";
    for (std::size_t r = 0; r < rows.size(); ++r) {
      html += fmt::format("<tr><th scope=row>{:.0f}</th>", row + static_cast<double>(r));
      for (std::size_t c = 0; c < rows[r].size(); ++c) {
        const bool is_known =
            !is_reference && !are_summands && r < reference.size() && c < reference[r].size();
        html += cell_of_number(rows[r][c], is_known ? reference[r][c] : json(nullptr));
      }
      html += "</tr>\n";
    }
    html += end_table();
  }
  return html + "</div>\n";
}

std::string calls_of(const json& item) {
  const json& calls = list_of(part_in(item, "evidence"), "calls");
  if (calls.empty()) return "";
  struct Lane {
    std::string axis, calls;
    std::vector<int> ranks;
  };
  std::vector<Lane> lanes;
  for (const json& rank : calls) {
    std::string words;
    for (const json& run : list_of(rank, "runs"))
      words += fmt::format("<li>{}</li>", call_in_words(run));
    if (part_in(rank, "cut") == true) words += "<li>and more</li>";
    const std::string axis = text_of(rank, "axis");
    const auto same = std::ranges::find_if(
        lanes, [&](const Lane& lane) { return lane.axis == axis && lane.calls == words; });
    Lane& lane = same == lanes.end() ? lanes.emplace_back(Lane{axis, words, {}}) : *same;
    lane.ranks.push_back(static_cast<int>(number_of(rank, "rank")));
  }
  std::string html =
      "<details><summary>Collective calls of the first step, in order</summary>\n" +
      begin_table(
          "Ranks that make the same calls stand together. An order, not times: each group "
          "of ranks waits in every call until all are there") +
      "<thead><tr><th scope=col class=name>axis</th><th scope=col class=name>ranks</th><th "
      "scope=col class=name>calls, first to last</th></tr></thead><tbody>\n";
  for (const Lane& lane : lanes) {
    html += fmt::format(
        "<tr><th scope=row>{}</th><td class=name>{}</td><td class=name><ol class=lane>{}</ol></td>"
        "</tr>\n",
        lane.axis, ranges_in_words(lane.ranks), lane.calls);
  }
  return html + end_table() + "</details>\n";
}

}  // namespace isoshard::html
