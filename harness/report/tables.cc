// SPDX-License-Identifier: Apache-2.0
// What tables are made of: differences, which modules are listed.
#include "harness/report/tables.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/observe/layer_name.h"
#include "core/observe/record_name.h"

namespace isoshard {
namespace {

double quotient(double a, double b) noexcept {
  if (a == 0) return 0;
  return b == 0 ? std::numeric_limits<double>::infinity() : a / b;
}

/// A NaN is more than any number, so that it stays.
bool is_more(double a, double b) noexcept {
  return !std::isnan(b) && !(a <= b);
}

/// What follows the layer's number; nothing at all for a module outside the layers.
std::optional<std::vector<std::string_view>> words_in_layer(std::string_view name) {
  if (!layer_in(name).has_value()) return std::nullopt;
  std::vector<std::string_view> words;
  for (std::string_view rest = within_layer(name); !rest.empty();) {
    const auto dot = rest.find('.');
    words.push_back(rest.substr(0, dot));
    rest = dot == std::string_view::npos ? std::string_view() : rest.substr(dot + 1);
  }
  return words;
}

}  // namespace

double Difference::relative() const noexcept {
  return quotient(error_norm, norm);
}

double Difference::max_abs_by_norm() const noexcept {
  return quotient(max_abs, norm);
}

Difference difference_of(const Stats& stats) {
  return {stats.numel,
          stats.nonfinite_mismatch != 0 ? std::numeric_limits<double>::quiet_NaN() : stats.max_abs,
          std::sqrt(stats.sum_sq_reference), std::sqrt(stats.sum_sq_diff)};
}

Difference difference_of(const std::vector<double>& other, const std::vector<double>& values) {
  Difference result;
  double squares = 0, error_squares = 0;
  for (std::size_t i = 0; i < other.size() && i < values.size(); ++i) {
    const double d = std::fabs(values[i] - other[i]);
    if (is_more(d, result.max_abs)) result.max_abs = d;
    squares += other[i] * other[i];
    error_squares += d * d;
    ++result.numel;
  }
  result.norm = std::sqrt(squares);
  result.error_norm = std::sqrt(error_squares);
  return result;
}

GradientComparison compare_gradient_norms(const std::map<std::string, double>& other,
                                          const std::map<std::string, double>& norms) {
  GradientComparison result;
  double sum = 0, relative_sum = 0;
  for (const auto& [name, norm] : norms) {
    const auto found = other.find(name);
    if (found == other.end()) continue;
    const double d = std::fabs(norm - found->second), relative = quotient(d, found->second);
    ++result.parameters;
    sum += d;
    relative_sum += relative;
    if (is_more(d, result.max_abs)) {
      result.max_abs = d;
      result.max_abs_name = name;
    }
    if (is_more(relative, result.max_relative)) {
      result.max_relative = relative;
      result.max_relative_name = name;
    }
  }
  if (result.parameters == 0) return result;
  result.mean_abs = sum / static_cast<double>(result.parameters);
  result.mean_relative = relative_sum / static_cast<double>(result.parameters);
  return result;
}

SameBits same_bits(const TableColumn& other, const TableColumn& column) {
  SameBits same;
  same.as = other.title;
  const auto count = [&](const std::map<std::string, std::uint64_t>& theirs,
                         const std::map<std::string, std::uint64_t>& own, int& equal, int& both) {
    for (const auto& [name, digest] : own) {
      const auto found = theirs.find(name);
      if (found == theirs.end()) continue;
      ++both;
      if (found->second == digest) {
        ++equal;
      } else if (std::ranges::find(same.different, name) == same.different.end()) {
        same.different.push_back(name);
      }
    }
  };
  count(other.output_digests, column.output_digests, same.outputs, same.outputs_of);
  count(other.gradient_digests, column.gradient_digests, same.output_gradients,
        same.output_gradients_of);
  return same;
}

const TableColumn* ComparisonTables::find(std::string_view name) const noexcept {
  const auto found = std::find_if(columns.begin(), columns.end(),
                                  [&](const TableColumn& column) { return column.title == name; });
  return found == columns.end() ? nullptr : &*found;
}

bool is_listed_module(std::string_view name) {
  if (parse_record_name(RecordKind::kActivation, name).role == NameRole::kSummand) return false;
  const auto words = words_in_layer(name);
  if (!words.has_value() || words->empty()) return true;
  const std::string_view last = words->back();
  if (words->size() == 1)
    return !last.starts_with("ln_") && last.find("norm") == std::string_view::npos;
  constexpr std::array kProjections{"q_proj", "o_proj", "gate_proj",   "down_proj",  "q",
                                    "c_proj", "c_fc",   "linear_proj", "linear_fc1", "linear_fc2"};
  return std::find(kProjections.begin(), kProjections.end(), last) != kProjections.end();
}

}  // namespace isoshard
