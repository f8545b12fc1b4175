// SPDX-License-Identifier: Apache-2.0
// CSV and pictures of tables.
#include "subjects/parallel/nd/schedule/schedule_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "core/base/error.h"
#include "core/base/printable.h"

namespace isoshard {
namespace {

/// Where a cell is, for messages.
struct CellPlace {
  std::string_view source;
  std::size_t line, cell;
};

[[noreturn]] void refuse(const CellPlace& place, std::string_view text, std::string_view what) {
  throw FileError(fmt::format("{}: line {}, cell {}: {}, got '{}'", place.source, place.line,
                              place.cell, what, printable(text)));
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

/// Stages and micro-batches of a file are below it, so that a file cannot ask for endless work.
constexpr int kLargestNumber = 4096;

/// Takes a number below kLargestNumber from the front of `text`.
std::optional<int> take_number(std::string_view& text) {
  int number = 0;
  if (text.empty() || text.front() == '-') return std::nullopt;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number >= kLargestNumber) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

constexpr std::array<std::string_view, 8> kNoComputation = {
    "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "OVERLAP_F_B"};

PipelineAction action_of(std::string_view text, const CellPlace& place) {
  for (const std::string_view name : kNoComputation)
    if (text.find(name) != std::string_view::npos)
      refuse(place, text,
             fmt::format("{} must not be in a table of computations (give torch's dump with "
                         "format=\"compute_only\")",
                         name));
  constexpr std::string_view kKinds = "FBIW";
  constexpr std::string_view kForm =
      "an action must be a stage, one of F, B, I, W, and a micro-batch (such as 0F0; numbers below "
      "4096)";
  std::string_view rest = text;
  const std::optional<int> stage = take_number(rest);
  if (!stage || rest.empty() || kKinds.find(rest.front()) == std::string_view::npos)
    refuse(place, text, kForm);
  const auto kind = static_cast<ActionKind>(rest.front());
  rest.remove_prefix(1);
  const std::optional<int> micro_batch = take_number(rest);
  if (!micro_batch || !rest.empty()) refuse(place, text, kForm);
  return {kind, *stage, *micro_batch};
}

PipelineTable table_of(std::string_view csv, std::string_view source) {
  PipelineTable table;
  std::vector<std::string_view> lines = split(csv, '\n');
  if (trimmed(lines.back()).empty()) lines.pop_back();  // what follows the last line's end
  for (std::size_t line = 0; line < lines.size(); ++line) {
    auto& row = table.emplace_back();
    const std::vector<std::string_view> cells = split(lines[line], ',');
    for (std::size_t cell = 0; cell < cells.size(); ++cell) {
      const std::string_view text = trimmed(cells[cell]);
      if (text.empty())
        row.emplace_back();
      else
        row.emplace_back(action_of(text, {source, line + 1, cell + 1}));
    }
  }
  return table;
}

bool lies_as(const PipelineTable& table, const PipelineSpec& spec) {
  for (std::size_t rank = 0; rank < table.size(); ++rank)
    for (const auto& action : table[rank])
      if (action && !std::cmp_equal(rank_of_stage(spec, action->stage), rank)) return false;
  return true;
}

std::string cell_text(const std::optional<PipelineAction>& action, bool with_stage) {
  if (!action) return ".";
  if (with_stage) return to_string(*action);
  return fmt::format("{}{}", static_cast<char>(action->kind), action->micro_batch);
}

}  // namespace

std::string csv_of(const PipelineSchedule& schedule) {
  std::string csv;
  for (const auto& row : schedule.table) {
    std::string_view separator;
    for (const auto& action : row) {
      csv += separator;
      if (action) csv += to_string(*action);
      separator = ",";
    }
    csv += '\n';
  }
  return csv;
}

PipelineSchedule schedule_from_csv(const PipelineSpec& spec, std::string_view csv,
                                   std::string_view source) {
  return {spec, table_of(csv, source)};
}

PipelineSpec spec_of_csv(std::string_view csv, std::string_view source) {
  const PipelineTable table = table_of(csv, source);
  int stages = 0, micro_batches = 0, actions = 0;
  for (const auto& row : table) {
    for (const auto& action : row) {
      if (!action) continue;
      stages = std::max(stages, action->stage + 1);
      micro_batches = std::max(micro_batches, action->micro_batch + 1);
      ++actions;
    }
  }
  if (stages == 0)
    throw FileError(fmt::format("{}: a schedule must have at least one action, got none", source));
  // A table that lacks a few is for the checker to name them; one that lacks most is no schedule.
  if (actions < stages * micro_batches)
    throw FileError(
        fmt::format("{}: a schedule of {} stages and {} micro-batches must have at least {} "
                    "actions (a forward and a backward of each), got {}",
                    source, stages, micro_batches, 2 * stages * micro_batches, actions));
  const int pp = static_cast<int>(table.size());
  if (stages % pp != 0)
    throw FileError(
        fmt::format("{}: the number of stages must be a multiple of the {} lines (one "
                    "a rank), got {}",
                    source, pp, stages));
  for (const StagePlacement placement : {StagePlacement::kLoop, StagePlacement::kV}) {
    const PipelineSpec spec{PipelineKind::kCustom, pp, stages / pp, placement, micro_batches};
    if (lies_as(table, spec)) return spec;
  }
  throw FileError(
      fmt::format("{}: {} stages on {} ranks must lie in a loop (stage s on rank s mod "
                  "{}) or on a V, got neither",
                  source, stages, pp, pp));
}

std::string picture(const PipelineSchedule& schedule, int width) {
  const bool with_stage = schedule.spec.stages_per_rank > 1;
  const std::size_t ranks = schedule.table.size();
  std::size_t time_steps = 0;
  for (const auto& row : schedule.table) time_steps = std::max(time_steps, row.size());
  std::size_t cell = std::to_string(time_steps).size();
  for (const auto& row : schedule.table)
    for (const auto& action : row) cell = std::max(cell, cell_text(action, with_stage).size());
  const std::size_t label = fmt::format("rank {}", ranks).size();
  const int room = (width - static_cast<int>(label)) / static_cast<int>(cell + 1);
  if (room < 1)
    throw UsageError(
        fmt::format("the width of a picture must be at least {}, got {}", label + cell + 1, width));
  const auto line_of = [&](const std::string& name, auto&& text, std::size_t begin,
                           std::size_t end) {
    std::string line = fmt::format("{:<{}}", name, label);
    for (std::size_t step = begin; step < end; ++step)
      line += fmt::format(" {:<{}}", text(step), cell);
    return line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
  };
  std::string text;
  for (std::size_t begin = 0; begin < time_steps; begin += static_cast<std::size_t>(room)) {
    const std::size_t end = std::min(time_steps, begin + static_cast<std::size_t>(room));
    if (begin > 0) text += '\n';
    text += line_of(
        "time", [](std::size_t step) { return std::to_string(step); }, begin, end);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const auto& row = schedule.table[rank];
      text += line_of(
          fmt::format("rank {}", rank),
          [&](std::size_t step) {
            return step < row.size() ? cell_text(row[step], with_stage) : std::string();
          },
          begin, end);
    }
  }
  return text;
}

}  // namespace isoshard
