// SPDX-License-Identifier: Apache-2.0
// Tables for the terminal.
#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "core/observe/layer_name.h"
#include "harness/report/text/hanging.h"
#include "harness/report/text/verdict_text.h"

namespace isoshard {
namespace {

constexpr std::size_t kMaxLayers = 8;  ///< listed, unless every module is asked for

/// The number of a module's layer; -1 outside of layers.
long layer_number(std::string_view name) {
  const auto layer = layer_in(name);
  return layer.has_value() ? layer->number : -1;
}

bool is_layer(std::string_view name) {
  const auto dot = name.rfind('.');
  return dot != std::string_view::npos && layer_number(name.substr(dot + 1)) >= 0;
}

struct Grid {
  std::string title;
  std::vector<std::string> rows;
  std::vector<std::string> columns;
  std::function<std::string(std::size_t row, std::size_t column)> cell;
};

/// Columns that do not fit a line beside each other stand below each other.
std::string drawn(const Grid& grid, std::size_t line_width) {
  constexpr std::size_t kIndent = 4, kGap = 2;
  std::size_t name_width = 0;
  for (const std::string& row : grid.rows) name_width = std::max(name_width, row.size());
  std::vector<std::size_t> widths;
  std::vector<std::vector<std::string>> cells(grid.rows.size());
  for (std::size_t c = 0; c < grid.columns.size(); ++c) {
    widths.push_back(grid.columns[c].size());
    for (std::size_t r = 0; r < grid.rows.size(); ++r) {
      cells[r].push_back(grid.cell(r, c));
      widths[c] = std::max(widths[c], cells[r][c].size());
    }
  }
  std::string text = hanging("  ", grid.title, line_width);
  for (std::size_t first = 0; first < widths.size();) {
    std::size_t end = first, width = kIndent + name_width;
    do {
      width += kGap + widths[end++];
    } while (end < widths.size() && width + kGap + widths[end] <= line_width);
    text += fmt::format("    {:<{}}", "", name_width);
    for (std::size_t c = first; c < end; ++c)
      text += fmt::format("  {:>{}}", grid.columns[c], widths[c]);
    text += "\n";
    for (std::size_t r = 0; r < grid.rows.size(); ++r) {
      text += fmt::format("    {:<{}}", grid.rows[r], name_width);
      for (std::size_t c = first; c < end; ++c)
        text += fmt::format("  {:>{}}", cells[r][c], widths[c]);
      text += "\n";
    }
    first = end;
  }
  return text;
}

class Tables {
 public:
  Tables(const ComparisonTables& tables, bool all_modules, std::size_t width)
      : tables_(tables), width_(width) {
    for (const std::string& name : tables.modules) {
      if (all_modules || is_shown(name)) rows_.push_back(name);
    }
    for (const TableColumn& column : tables.columns) titles_.push_back(column.title);
  }

  std::string run() const {
    std::string text = hanging(
        "",
        fmt::format("{} side by side (step 0; modules: dp rank 0's samples, shards put together{})",
                    tables_.title,
                    rows_.size() < tables_.modules.size()
                        ? fmt::format("; {} of {} modules, all with --verbose", rows_.size(),
                                      tables_.modules.size())
                        : ""),
        width_);
    text +=
        losses() + norms("output norms", &TableColumn::output_norms) +
        norms("norms of output gradients (of dp rank 0's own loss)", &TableColumn::gradient_norms);
    text += differences("from the reference (global batch)", &TableColumn::from_reference);
    if (!tables_.baseline.empty())
      text += differences(fmt::format("from {} (dp rank 0's samples)", tables_.baseline),
                          &TableColumn::from_baseline);
    text += gradients() + same_bits();
    return tables_.shows_local ? text + local() : text;
  }

 private:
  [[nodiscard]] std::string draw(const Grid& grid) const { return drawn(grid, width_); }

  /// Of layers but the first only their outputs; of many layers the first and last ones.
  bool is_shown(const std::string& name) const {
    const long layer = layer_number(name);
    if (layer <= 0) return true;
    long last = 0;
    for (const std::string& other : tables_.modules) last = std::max(last, layer_number(other));
    constexpr auto kHalf = static_cast<long>(kMaxLayers / 2);
    return is_layer(name) && (layer < kHalf || layer > last - kHalf);
  }

  std::string losses() const {
    std::size_t ranks = 0;
    for (const TableColumn& column : tables_.columns) ranks = std::max(ranks, column.losses.size());
    if (ranks == 0) return "";
    std::vector<std::string> rows;
    for (std::size_t r = 0; r < ranks; ++r) rows.push_back(fmt::format("dp rank {}", r));
    const TableColumn* baseline = tables_.find(tables_.baseline);
    const auto cell = [&](std::size_t r, std::size_t c) -> std::string {
      const TableColumn& column = tables_.columns[c];
      if (r >= column.losses.size()) return "-";
      std::string loss = fmt::format("{:.8f}", column.losses[r]);
      if (baseline == nullptr || &column == baseline || r >= baseline->losses.size()) return loss;
      return fmt::format(
          "{} ({:.2e})", loss,
          std::fabs(column.losses[r] - baseline->losses[r]) / std::fabs(baseline->losses[r]));
    };
    return draw({baseline == nullptr
                     ? "losses"
                     : fmt::format("losses (relative difference from {})", baseline->title),
                 rows, titles_, cell});
  }

  std::string norms(std::string_view title,
                    std::map<std::string, double> TableColumn::*norms) const {
    const auto cell = [&](std::size_t r, std::size_t c) -> std::string {
      const auto& map = tables_.columns[c].*norms;
      const auto found = map.find(rows_[r]);
      return found == map.end() ? "-" : fmt::format("{:.6g}", found->second);
    };
    return draw({std::string(title), rows_, titles_, cell});
  }

  using Differences = std::map<std::string, ModuleDifference> TableColumn::*;

  std::string differences(const std::string& from, Differences of) const {
    std::vector<const TableColumn*> columns;
    std::vector<std::string> titles;
    for (const TableColumn& column : tables_.columns) {
      if ((column.*of).empty()) continue;
      columns.push_back(&column);
      titles.push_back(column.title);
    }
    if (columns.empty()) return "";
    std::string text;
    for (const bool is_first : {false, true}) {
      const auto cell = [&](std::size_t r, std::size_t c) -> std::string {
        const auto& map = columns[c]->*of;
        const auto found = map.find(rows_[r]);
        if (found == map.end()) return "-";
        const Difference& d = is_first ? found->second.first : found->second.whole;
        if (d.numel == 0) return "-";
        const bool is_cut = !is_first && d.numel < found->second.whole_of;
        return fmt::format("{:.2e} {:.2e}{}", d.max_abs,
                           is_first ? d.max_abs_by_norm() : d.relative(), is_cut ? "*" : "");
      };
      const std::string over =
          is_first ? fmt::format("first {} elements (relative: max abs / norm)", kListedElements)
                   : "all elements (relative: of Frobenius norms)";
      text += draw(
          {fmt::format("max abs and relative difference {}, {}", from, over), rows_, titles, cell});
    }
    return text;
  }

  std::string same_bits() const {
    std::string text;
    for (const TableColumn& column : tables_.columns) {
      if (!column.same_bits.has_value()) continue;
      const SameBits& same = *column.same_bits;
      text += fmt::format(
          "    {} and {}: {} of {} outputs and {} of {} output gradients{}\n", column.title,
          same.as, same.outputs, same.outputs_of, same.output_gradients, same.output_gradients_of,
          same.different.empty() ? "" : "; first different " + same.different.front());
    }
    return text.empty() ? "" : "  equal bits of runs of one mesh (dp rank 0's samples)\n" + text;
  }

  /// What a tool shows that looks at one rank's tensors and takes them for whole ones.
  std::string local() const {
    const auto of = [&](std::string_view title, std::map<std::string, double> LocalNorms::*norms) {
      const auto cell = [&](std::size_t r, std::size_t c) -> std::string {
        const auto& map = tables_.columns[c].local.*norms;
        const auto found = map.find(rows_[r]);
        return found == map.end() ? "-" : fmt::format("{:.6g}", found->second);
      };
      return draw({fmt::format("  {}", title), rows_, titles_, cell});
    };
    std::string text =
        of("output norms on rank 0 alone", &LocalNorms::outputs) +
        of("norms of output gradients on rank 0 alone", &LocalNorms::output_gradients);
    std::vector<std::string> rows;
    std::vector<GradientComparison> values;
    for (const TableColumn& column : tables_.columns) {
      if (!column.local_from_baseline_sharded.has_value()) continue;
      rows.push_back(fmt::format("{}, sharded", column.title));
      values.push_back(*column.local_from_baseline_sharded);
      rows.push_back(fmt::format("{}, whole", column.title));
      values.push_back(column.local_from_baseline_whole.value_or(GradientComparison{}));
    }
    if (rows.empty()) return text;
    const auto cell = [&](std::size_t r, std::size_t c) -> std::string {
      const GradientComparison& g = values[r];
      if (c == 0) return fmt::format("{}", g.parameters);
      return g.parameters == 0 ? "-"
                               : fmt::format("{:.2e}", c == 1   ? g.mean_relative
                                                       : c == 2 ? g.max_relative
                                                                : g.max_abs);
    };
    return text + draw({fmt::format("  norms of parameter gradients on rank 0 alone, from {}'s "
                                    "whole ones",
                                    tables_.baseline),
                        rows,
                        {"parameters", "mean relative", "max relative", "max abs"},
                        cell});
  }

  std::string gradients() const {
    std::vector<std::string> rows;
    std::vector<GradientComparison> values;
    const auto add = [&](const std::string& name, const std::string& other,
                         const std::optional<GradientComparison>& comparison) {
      if (!comparison.has_value()) return;
      rows.push_back(fmt::format("{} from {}", name, other));
      values.push_back(*comparison);
    };
    for (const TableColumn& column : tables_.columns) {
      add(column.title, "the reference", column.gradients_from_reference);
      add(column.title, tables_.baseline, column.gradients_from_baseline);
    }
    if (rows.empty()) return "";
    const auto cell = [&](std::size_t r, std::size_t c) -> std::string {
      const GradientComparison& g = values[r];
      if (c == 0) return fmt::format("{}", g.parameters);
      return fmt::format("{:.2e}", c == 1 ? g.max_abs : c == 2 ? g.mean_abs : g.max_relative);
    };
    std::string text = draw({"norms of parameter gradients",
                             rows,
                             {"parameters", "max abs", "mean abs", "max relative"},
                             cell});
    for (std::size_t r = 0; r < rows.size(); ++r)
      text += hanging(
          "    ", fmt::format("{}: largest relative in {}", rows[r], values[r].max_relative_name),
          width_);
    return text;
  }

  const ComparisonTables& tables_;
  std::size_t width_;
  std::vector<std::string> rows_, titles_;
};

}  // namespace

std::string render_tables(const ComparisonTables& tables, bool all_modules, std::size_t width) {
  return Tables(tables, all_modules, width).run();
}

}  // namespace isoshard
