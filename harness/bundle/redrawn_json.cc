// SPDX-License-Identifier: Apache-2.0
/// Writing and strictly reading redrawn.json.
#include "harness/bundle/redrawn_json.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "harness/bundle/bundle_form.h"
#include "harness/bundle/bundle_json.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::size_t kNumbersOfDraw = 4;
constexpr int kMostRuns = 1 << 16;

double number_of(const json& value, const fs::path& file) {
  const std::optional<double> number =
      value.is_string() ? parse_hex(value.get<std::string>()) : std::nullopt;
  if (!number || !std::isfinite(*number))
    detail::refuse_form(file, "a draw must hold finite hex floats");
  return *number;
}

RedrawnSums draw_of(const json& value, int runs, const RedrawnSums* before, const fs::path& file) {
  if (!value.is_array() || value.size() != kNumbersOfDraw || !value[0].is_number_integer())
    detail::refuse_form(file, "a draw must be the number of its run and three hex floats");
  const auto run = value[0].get<std::int64_t>();
  if (run < (before == nullptr ? 0 : before->run + 1) || run >= runs)
    detail::refuse_form(
        file, fmt::format("draws must be in the order of their runs, below {}, got {}", runs, run));
  RedrawnSums sums{static_cast<int>(run), number_of(value[1], file), number_of(value[2], file),
                   number_of(value[3], file)};
  if (sums.sum_sq_diff < 0)
    detail::refuse_form(
        file, fmt::format("a sum of squares must not be negative, got {}", sums.sum_sq_diff));
  if (sums.sum_sq_diff == 0 && (sums.dot_diff != 0 || sums.sum_diff != 0))
    detail::refuse_form(file, "a run without differences must have no sums of them");
  return sums;
}

}  // namespace

namespace detail {

json to_json(const Redrawn& redrawn) {
  json list = json::array();
  for (const auto& [key, sums] : redrawn.sums) {
    json draws = json::array();
    for (const RedrawnSums& s : sums)
      draws.push_back({s.run, to_hex(s.sum_sq_diff), to_hex(s.dot_diff), to_hex(s.sum_diff)});
    json entry = key_json(key);
    entry["draws"] = std::move(draws);
    list.push_back(std::move(entry));
  }
  return {{"schema", 1}, {"runs", redrawn.runs}, {"redrawn", list}};
}

Redrawn redrawn_of(const json& whole, const fs::path& file) {
  const int schema = field<int>(whole, "schema", file);
  if (schema != 1)
    detail::refuse_form(
        file, fmt::format("the schema must be 1, which this program reads, got {}", schema));
  Redrawn redrawn;
  redrawn.runs = field<int>(whole, "runs", file);
  if (redrawn.runs < 1 || redrawn.runs > kMostRuns)
    detail::refuse_form(file,
                        fmt::format("\"runs\" must be 1 to {}, got {}", kMostRuns, redrawn.runs));
  for (const json& entry : field<json>(whole, "redrawn", file)) {
    std::vector<RedrawnSums> sums;
    for (const json& draw : field<json>(entry, "draws", file))
      sums.push_back(draw_of(draw, redrawn.runs, sums.empty() ? nullptr : &sums.back(), file));
    if (!redrawn.sums.emplace(key_of(entry, {}, file), std::move(sums)).second)
      detail::refuse_form(file, "a record is listed twice");
  }
  return redrawn;
}

}  // namespace detail
}  // namespace isoshard
