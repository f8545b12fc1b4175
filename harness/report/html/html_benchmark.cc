// SPDX-License-Identifier: Apache-2.0
// Tables and pictures of one benchmark.
#include "harness/report/html/html_benchmark.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "harness/report/html/html_text.h"

namespace isoshard::html {
namespace {

using nlohmann::json;

struct Part {
  std::string_view name;
  const char* field;  ///< of summary.timing_breakdown
  int color;          ///< p0 to p7 of the style sheet
};
constexpr std::array kParts{Part{"forward", "forward_pct", 0}, Part{"backward", "backward_pct", 1},
                            Part{"optimizer", "optimizer_pct", 2},
                            Part{"communication", "communication_pct", 4},
                            Part{"other", "other_pct", 7}};

/// Of a span of a timeline: whatever is no part is the purpose of a call.
const Part& part_of(std::string_view what) {
  for (const Part& part : kParts)
    if (part.name == what) return part;
  return kParts[3];
}

std::string milliseconds(double value) {
  return fmt::format("{:.{}f}", value, value >= 100 ? 0 : value >= 10 ? 1 : 3);
}

std::string bytes_in_words(double bytes) {
  if (bytes >= 1 << 20) return fmt::format("{:.1f} MiB", bytes / (1 << 20));
  return bytes >= 1 << 10 ? fmt::format("{:.1f} KiB", bytes / (1 << 10))
                          : fmt::format("{:.0f} B", bytes);
}

std::string row_of_words(std::string_view title, const std::string& text) {
  return text.empty() ? "" : fmt::format("<dt>{}</dt><dd>{}</dd>\n", title, text);
}

std::string utilization_of(const json& summary, const json& machine) {
  const json& share = part_in(summary, "model_flops_utilization");
  const double ceiling = number_of(machine, "gemm_ceiling_flops_per_sec") / 1e9;
  if (!share.is_number())
    return fmt::format(
        "not shown: steps were faster than the {:.1f} GFLOP/s of products beside them, so the "
        "machine was busy when these were timed",
        ceiling);
  return fmt::format("{:.1f} % of the {:.1f} GFLOP/s that products reached beside the steps",
                     100 * share.get<double>(), ceiling);
}

std::string head_of(const json& result) {
  const json &config = part_in(result, "config"), &summary = part_in(result, "summary"),
             &gate = part_in(result, "gate"), &overlap = part_in(summary, "overlap");
  const std::string strength = text_of(gate, "strength");
  std::string html = "<dl>";
  html += row_of_words("Implementation", text_of(config, "impl"));
  html +=
      row_of_words("Model", fmt::format("{}, {:.0f} layers, {}", text_of(config, "model_name"),
                                        number_of(config, "num_layers"), text_of(config, "dtype")));
  html += row_of_words("Gate", fmt::format("{}{}{}", text_of(gate, "state"),
                                           strength.empty() ? "" : ", ", strength));
  html +=
      row_of_words("Step", fmt::format("median {} ms, 95 % below {} ms, mean {} ms of {:.0f} steps",
                                       milliseconds(number_of(summary, "p50_step_time_ms")),
                                       milliseconds(number_of(summary, "p95_step_time_ms")),
                                       milliseconds(number_of(summary, "avg_step_time_ms")),
                                       number_of(summary, "num_steps")));
  html += row_of_words("Speed", fmt::format("{:.1f} tokens/s of the global batch",
                                            number_of(summary, "avg_tokens_per_sec")));
  html += row_of_words("Utilization", utilization_of(summary, part_in(result, "machine")));
  const std::string hidden =
      part_in(overlap, "hidden_share").is_number()
          ? fmt::format("{:.1f} % is hidden behind computation",
                        100 * number_of(overlap, "hidden_share"))
          : "what is hidden behind computation is not measured on these ranks";
  html += row_of_words("Communication",
                       fmt::format("{}, {:.1f} % is issued during backward", hidden,
                                   100 * number_of(overlap, "issued_in_backward_share")));
  html += row_of_words(
      "Memory",
      fmt::format("at most {} of tensors a rank, {} on all ranks",
                  bytes_in_words(number_of(summary, "peak_memory_gb") * (1 << 30)),
                  bytes_in_words(number_of(summary, "peak_memory_all_ranks_gb") * (1 << 30))));
  return html + "</dl>\n";
}

std::string parts_of(const json& summary) {
  constexpr double kWidth = 900, kHeight = 34;
  const json& shares = part_in(summary, "timing_breakdown");
  const double step = number_of(summary, "avg_step_time_ms");
  std::string drawn, rows;
  double x = 0;
  for (const Part& part : kParts) {
    const double share = number_of(shares, part.field), width = kWidth * share / 100;
    drawn += fmt::format("<rect x={:.1f} y=0 width={:.1f} height={} class=p{} />", x, width,
                         kHeight, part.color);
    if (width > 8.0 * static_cast<double>(part.name.size()))
      drawn += fmt::format("<text x={:.1f} y=21>{}</text>", x + 5, part.name);
    x += width;
    rows += fmt::format("<tr><th scope=row>{}</th><td>{}</td><td>{:.1f} %</td></tr>\n", part.name,
                        milliseconds(step * share / 100), share);
  }
  return fmt::format(
      "<h3>Where a step goes</h3>\n<svg viewBox=\"0 0 {0} {1}\" width={0} height={1} role=img "
      "aria-label=\"Parts of a step; the table below has the numbers\">{2}</svg>\n{3}"
      "<thead><tr><th scope=col class=name>part</th><th scope=col>ms</th><th scope=col>of the "
      "step</th></tr></thead><tbody>{4}</tbody>{5}",
      kWidth, kHeight, drawn,
      begin_table("Means of the rank that took longest in each step. Time inside of a call of the "
                  "communicator is communication and nothing else"),
      rows, end_table());
}

/// A stretch of a lane, in ms.
struct Stretch {
  const Part* part = nullptr;
  double begin = 0, end = 0;
};

/// All of a lane that can be read.
std::vector<Stretch> stretches_of(const json& lane) {
  std::vector<Stretch> all;
  for (const json& span : list_of(lane, "spans")) {
    if (!span.is_array() || span.size() != 3 || !span[0].is_string() || !span[1].is_number() ||
        !span[2].is_number())
      continue;
    all.push_back({&part_of(span[0].get<std::string>()), span[1], span[2]});
  }
  return all;
}

/// What can be seen of it: stretches narrower than `least` ms join the one before.
std::vector<Stretch> joined(const std::vector<Stretch>& stretches, double least) {
  std::vector<Stretch> all;
  for (const Stretch& own : stretches) {
    if (!all.empty() && (all.back().part == own.part || own.end - own.begin < least)) {
      all.back().end = own.end;
    } else {
      all.push_back(own);
    }
  }
  return all;
}

std::string timeline_of(const json& result) {
  constexpr double kLane = 24, kLeft = 60, kFull = 900, kAxis = 22;
  constexpr std::size_t kMostLanes = 16;
  const json& timeline = part_in(result, "timeline");
  const json& ranks = list_of(timeline, "ranks");
  double end = 0;
  for (const json& lane : ranks)
    for (const Stretch& stretch : stretches_of(lane)) end = std::max(end, stretch.end);
  if (!(end > 0) || !std::isfinite(end)) return "";
  const double unit = (kFull - kLeft - 8) / end;
  const std::size_t lanes = std::min(ranks.size(), kMostLanes);
  const double height = kLane * static_cast<double>(lanes) + kAxis;
  std::string drawn, rows;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    const double y = kLane * static_cast<double>(lane);
    drawn += fmt::format("<text x=4 y={:.0f}>rank {}</text>", y + 16, lane);
    const std::vector<Stretch> stretches = stretches_of(ranks[lane]);
    for (const Stretch& stretch : joined(stretches, 1 / unit))
      drawn += fmt::format("<rect x={:.1f} y={:.0f} width={:.1f} height={:.0f} class=p{} />",
                           kLeft + unit * stretch.begin, y + 2,
                           unit * (stretch.end - stretch.begin), kLane - 4, stretch.part->color);
    std::map<std::string_view, double> sums;
    for (const Stretch& stretch : stretches)
      sums[stretch.part->name] += stretch.end - stretch.begin;
    rows += fmt::format("<tr><th scope=row>rank {}</th>", lane);
    for (const Part& part : kParts)
      rows += fmt::format("<td>{}</td>", milliseconds(sums[part.name]));
    rows += "</tr>\n";
  }
  std::string legend, heads;
  for (const Part& part : kParts) {
    legend += fmt::format(
        "<li><svg width=14 height=14 aria-hidden=true><rect width=14 height=14 class=p{} /></svg> "
        "{}</li>",
        part.color, part.name);
    heads += fmt::format("<th scope=col>{}</th>", part.name);
  }
  const bool is_cut =
      std::ranges::any_of(ranks, [](const json& lane) { return part_in(lane, "cut") == true; });
  return fmt::format(
      "<h3>Timeline of step {:.0f}</h3>\n<ul class=legend>{}</ul>\n<svg viewBox=\"0 0 {} {:.0f}\" "
      "width={} height={:.0f} role=img aria-label=\"What each rank did in its last step; the table "
      "below has the sums\">{}<text x={} y={:.0f}>time: 0 to {} ms</text></svg>\n{}"
      "<p>Stretches too narrow to see belong to the one before.{}</p>\n"
      "<details><summary>The same as a table</summary>{}<thead><tr><td></td>{}</tr></thead>"
      "<tbody>{}</tbody>{}</details>\n",
      number_of(timeline, "step"), legend, kFull, height, kFull, height, drawn, kLeft, height - 6,
      milliseconds(end),
      lanes < ranks.size()
          ? fmt::format("<p>{} more ranks are left out.</p>\n", ranks.size() - lanes)
          : "",
      is_cut ? " The step had more calls than are kept: the rest of it is not drawn." : "",
      begin_table("Milliseconds of each rank in this step"), heads, rows, end_table());
}

constexpr const char* kOfBenchmark =
    "Of a step on the mean rank; bytes are those of all ranks. Times include waiting for the other "
    "ranks";

}  // namespace

std::string collectives_of(const json& rows, const std::string& caption) {
  double all = 0;
  for (const json& row : rows) all += number_of(row, "ms_per_step_and_rank");
  if (!(all > 0)) return "";
  std::string html = "<h3>Collectives by purpose</h3>\n" + begin_table(caption) +
                     "<thead><tr><th scope=col class=name>purpose</th><th scope=col>calls</th><th "
                     "scope=col>bytes</th><th scope=col>ms</th><th scope=col>of communication</th>"
                     "<th scope=col>median call, ms</th><th scope=col>hidden</th></tr></thead>"
                     "<tbody>\n";
  for (const json& row : rows) {
    const double own = number_of(row, "ms_per_step_and_rank");
    const json& hidden = part_in(row, "hidden_ms_per_step_and_rank");
    const double beside = hidden.is_number() ? hidden.get<double>() : 0;
    html += fmt::format(
        "<tr><th scope=row class=name>{}</th><td>{}</td><td>{}</td><td>{}</td><td>{:.1f} %</td>"
        "<td>{}</td><td>{}</td></tr>\n",
        text_of(row, "purpose"), short_number(number_of(row, "calls_per_step_and_rank")),
        bytes_in_words(number_of(row, "bytes_per_step_all_ranks")), milliseconds(own),
        100 * own / all,
        part_in(row, "median_call_ms").is_number() ? milliseconds(number_of(row, "median_call_ms"))
                                                   : "not measured",
        !hidden.is_number() ? "not measured"
        : own + beside > 0  ? fmt::format("{:.1f} %", 100 * beside / (own + beside))
                            : "0.0 %");
  }
  return html + "</tbody>" + end_table();
}

std::string benchmark_of(const json& item) {
  const json& result = part_in(item, "result");
  std::string html;
  if (result.is_object()) {
    html = head_of(result) + parts_of(part_in(result, "summary")) +
           collectives_of(list_of(result, "collectives"), kOfBenchmark) + timeline_of(result);
  }
  const std::string lines = fmt::format("<pre>{}</pre>\n", text_of(item, "text"));
  return html.empty()
             ? lines
             : html + "<details><summary>What was printed</summary>" + lines + "</details>\n";
}

}  // namespace isoshard::html
