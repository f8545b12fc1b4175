// SPDX-License-Identifier: Apache-2.0
// The file of a study: one line a run, so that a study can be broken off and go on.
#include <fmt/format.h>

#include <charconv>
#include <fstream>
#include <sstream>
#include <string_view>

#include "core/base/error.h"
#include "suite/study/study.h"

namespace isoshard {
namespace {

constexpr std::string_view kColumns =
    "index,case,composition,point,change,extent,magnitude,fired,visible,exact,within,first_loss,"
    "curve,forward,gradients,first_elements,exact_place,within_place,cause\n";
constexpr std::size_t kNumColumns = 19;

std::string_view flag(bool value) {
  return value ? "1" : "0";
}

std::string_view flag(const std::optional<bool>& value) {
  return value.has_value() ? flag(*value) : "";
}

class LineReader {
 public:
  LineReader(std::string_view line, std::string origin) : origin_(std::move(origin)) {
    // the last column, a cause in words, may have commas
    while (fields_.size() + 1 < kNumColumns) {
      const std::size_t comma = line.find(',');
      if (comma == line.npos) refuse(fmt::format("{} columns", kNumColumns), line);
      fields_.push_back(line.substr(0, comma));
      line.remove_prefix(comma + 1);
    }
    fields_.push_back(line);
  }

  [[nodiscard]] std::string text() { return std::string(fields_.at(next_++)); }
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

 private:
  [[noreturn]] void refuse(std::string_view wanted, std::string_view got) const {
    throw FileError(fmt::format("{}: must be {}, got '{}'", origin_, wanted, got));
  }

  std::string origin_;
  std::vector<std::string_view> fields_;
  std::size_t next_ = 0;
};

StudyRow row_of(std::string_view line, std::string origin) {
  constexpr int kPoints = 4, kChanges = 7, kExtents = 3;
  LineReader reader(line, std::move(origin));
  StudyRow row;
  row.index = reader.number<std::int64_t>();
  row.case_slug = reader.text();
  row.composition = reader.text();
  row.point = reader.one_of<StudyPoint>(kPoints);
  row.change = reader.one_of<StudyChange>(kChanges);
  row.extent = reader.one_of<StudyExtent>(kExtents);
  row.magnitude = reader.number<double>();
  row.fired = reader.flag();
  row.is_visible = reader.flag();
  row.exact = reader.flag();
  row.within = reader.flag();
  for (bool& alarm : row.weak) alarm = reader.flag();
  row.exact_place = reader.maybe_flag();
  row.within_place = reader.maybe_flag();
  row.cause = reader.text();
  return row;
}

}  // namespace

std::string study_head(const StudyPlan& plan) {
  return fmt::format("# isoshard faults study, seed {}, curves of {} steps\n{}", plan.seed,
                     plan.curve_steps, kColumns);
}

std::string to_line(const StudyRow& row) {
  std::string line =
      fmt::format("{},{},{},{},{},{},{:g},{},{},{},{}", row.index, row.case_slug, row.composition,
                  name_of(row.point), name_of(row.change), name_of(row.extent), row.magnitude,
                  flag(row.fired), flag(row.is_visible), flag(row.exact), flag(row.within));
  for (const bool alarm : row.weak) line += fmt::format(",{}", flag(alarm));
  return line +
         fmt::format(",{},{},{}\n", flag(row.exact_place), flag(row.within_place), row.cause);
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
