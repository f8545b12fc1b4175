// SPDX-License-Identifier: Apache-2.0
// The file of a study: one line a run, so that a study can be broken off and go on. A field with
// commas, as values and words of a cause have, stands in quotation marks.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>

#include "core/base/error.h"
#include "harness/report/json/values_json.h"
#include "suite/study/study.h"

namespace isoshard {
namespace {

constexpr std::string_view kColumns =
    "index,case,composition,point,change,extent,magnitude,tag,op,purpose,over,axis,coordinate,"
    "bug_ranks,fired,visible,exact,within,first_loss,curve,forward,gradients,first_elements,"
    "exact_place,within_place,cause_place,cause_ranks,cause,cause_values,grade,diagnosis\n";
constexpr std::size_t kNumColumns = 31;

std::string_view flag(bool value) {
  return value ? "1" : "0";
}

std::string_view flag(const std::optional<bool>& value) {
  return value.has_value() ? flag(*value) : "";
}

std::string quoted(const std::string& text) {
  std::string field = "\"";
  for (const char c : text) field += c == '"' ? "\"\"" : std::string(1, c);
  return field + "\"";
}

/// The values of a cause as an object of JSON, by their names.
std::string to_json(const NamedValues& values) {
  nlohmann::json all = nlohmann::json::object();
  for (const NamedValue& value : values)
    if (value.is_data) all[value.name] = value_json(value.value);
  return all.dump();
}

class LineReader {
 public:
  LineReader(std::string_view line, std::string origin) : origin_(std::move(origin)) {
    std::string field;
    bool is_quoted = false;
    for (std::size_t i = 0; i < line.size(); ++i) {
      const bool is_mark = line[i] == '"', is_next_mark = line.substr(i + 1).starts_with('"');
      if (is_quoted && is_mark && is_next_mark) {
        field += line[i++];
      } else if (is_mark) {
        is_quoted = !is_quoted;
      } else if (line[i] == ',' && !is_quoted) {
        fields_.push_back(std::move(field));
        field.clear();
      } else {
        field += line[i];
      }
    }
    fields_.push_back(std::move(field));
    if (fields_.size() != kNumColumns)
      refuse(fmt::format("{} columns", kNumColumns), fmt::format("{}", fields_.size()));
  }

  [[nodiscard]] std::string text() { return fields_.at(next_++); }
  [[nodiscard]] std::vector<int> ranks() {
    std::vector<int> ranks;
    std::istringstream stream(text());
    for (int rank = 0; stream >> rank;) ranks.push_back(rank);
    return ranks;
  }
  [[nodiscard]] Cause cause() {
    Cause cause;
    const std::string id = text(), values = text();
    const std::optional<CauseId> found = id.empty() ? CauseId::kNone : find_id<CauseId>(id);
    if (!found.has_value()) refuse("a cause", id);
    cause.id = *found;
    const nlohmann::json all = nlohmann::json::parse(values, nullptr, /*allow_exceptions=*/false);
    if (!all.is_object()) refuse("values of a cause", values);
    for (const auto& [name, given] : all.items()) {
      const std::optional<IdValue> value = read_value(given);
      if (!value.has_value()) refuse("values of a cause", values);
      cause.values.emplace_back(name, *value);
    }
    return cause;
  }
  [[nodiscard]] bool flag() {
    const std::string_view field = fields_.at(next_++);
    if (field != "0" && field != "1") refuse("0 or 1", field);
    return field == "1";
  }
  [[nodiscard]] std::optional<bool> maybe_flag() {
    if (!fields_.at(next_).empty()) return flag();
    ++next_;
    return std::nullopt;
  }
  template <class Number>
  [[nodiscard]] Number number() {
    const std::string_view field = fields_.at(next_++);
    Number value{};
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
    if (error != std::errc() || end != field.data() + field.size()) refuse("a number", field);
    return value;
  }
  /// The enumerator of this name.
  template <class Enum>
  [[nodiscard]] Enum one_of(int count) {
    const std::string_view field = fields_.at(next_++);
    for (int i = 0; i < count; ++i)
      if (name_of(static_cast<Enum>(i)) == field) return static_cast<Enum>(i);
    refuse("a name that a study has", field);
  }
  template <class Enum>
  [[nodiscard]] std::optional<Enum> maybe_one_of(int count) {
    if (!fields_.at(next_).empty()) return one_of<Enum>(count);
    ++next_;
    return std::nullopt;
  }

 private:
  [[noreturn]] void refuse(std::string_view wanted, std::string_view got) const {
    throw FileError(fmt::format("{}: must be {}, got '{}'", origin_, wanted, got));
  }

  std::string origin_;
  std::vector<std::string> fields_;
  std::size_t next_ = 0;
};

StudyRow row_of(std::string_view line, std::string origin) {
  constexpr int kPoints = 4, kChanges = 7, kExtents = 3, kAxes = 8;
  LineReader reader(line, std::move(origin));
  StudyRow row;
  row.index = reader.number<std::int64_t>();
  row.case_slug = reader.text();
  row.composition = reader.text();
  row.bug.point = reader.one_of<FaultPoint>(kPoints);
  row.bug.change = reader.one_of<FaultChange>(kChanges);
  row.bug.extent = reader.one_of<FaultExtent>(kExtents);
  row.bug.magnitude = reader.number<double>();
  row.bug.name = reader.text();
  row.bug.called.op = reader.one_of<CollectiveOp>(kNumCollectiveOps);
  row.bug.called.purpose = reader.one_of<Purpose>(kNumPurposes);
  row.bug.called.axis = reader.one_of<Axis>(kAxes);
  const std::optional<Axis> axis = reader.maybe_one_of<Axis>(kAxes);
  const int coordinate = reader.number<int>();
  if (axis.has_value()) row.bug.ranks = FaultRanks{*axis, coordinate};
  row.bug_ranks = reader.ranks();
  row.fired = reader.flag();
  row.is_visible = reader.flag();
  row.exact = reader.flag();
  row.within = reader.flag();
  for (bool& alarm : row.weak) alarm = reader.flag();
  row.exact_place = reader.maybe_flag();
  row.within_place = reader.maybe_flag();
  row.blame.at_place = reader.maybe_flag();
  row.blame.ranks = reader.ranks();
  row.blame.cause = reader.cause();
  // the grade is computed again: a later version may know more causes
  (void)reader.text();
  row.diagnosis = reader.text();
  return row;
}

}  // namespace

std::string study_head(const StudyPlan& plan) {
  const std::string runs =
      plan.is_noise ? "noise only" : fmt::format("curves of {} steps", plan.curve_steps);
  return fmt::format("# isoshard faults study, seed {}, {}\n{}", plan.seed, runs, kColumns);
}

std::string to_line(const StudyRow& row) {
  const Injection& bug = row.bug;
  std::string line =
      fmt::format("{},{},{},{},{},{},{:g}", row.index, row.case_slug, row.composition,
                  name_of(bug.point), name_of(bug.change), name_of(bug.extent), bug.magnitude);
  line += fmt::format(
      ",{},{},{},{},{},{},{}", bug.name, name_of(bug.called.op.value_or(CollectiveOp::kAllReduce)),
      name_of(bug.called.purpose), name_of(bug.called.axis),
      bug.ranks.has_value() ? name_of(bug.ranks->axis) : "",
      bug.ranks.has_value() ? bug.ranks->coordinate : 0, fmt::join(row.bug_ranks, " "));
  line += fmt::format(",{},{},{},{}", flag(row.fired), flag(row.is_visible), flag(row.exact),
                      flag(row.within));
  for (const bool alarm : row.weak) line += fmt::format(",{}", flag(alarm));
  return line + fmt::format(",{},{},{},{},{},{},{},{}\n", flag(row.exact_place),
                            flag(row.within_place), flag(row.blame.at_place),
                            fmt::join(row.blame.ranks, " "), name_of(row.blame.cause.id),
                            quoted(to_json(row.blame.cause.values)), name_of(row.grade()),
                            quoted(row.diagnosis));
}

std::vector<StudyRow> read_study(const std::filesystem::path& file, const StudyPlan& plan) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream.is_open()) {
    if (!std::filesystem::exists(file)) return {};
    throw FileError(fmt::format("{}: cannot be read", file.string()));
  }
  std::stringstream buffer;
  buffer << stream.rdbuf();
  const std::string text = buffer.str(), head = study_head(plan);
  if (!text.starts_with(head)) {
    throw FileError(fmt::format(
        "{}: must begin with '{}', got '{}': take another --output-dir, or the seed and the number "
        "of steps of that study",
        file.string(), head.substr(0, head.find('\n')), text.substr(0, text.find('\n'))));
  }
  std::vector<StudyRow> rows;
  int line = 2;
  for (std::size_t begin = head.size(); begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    if (end == text.npos) break;
    rows.push_back(row_of(std::string_view(text).substr(begin, end - begin),
                          fmt::format("{}: line {}", file.string(), ++line)));
    begin = end + 1;
  }
  return rows;
}

}  // namespace isoshard
