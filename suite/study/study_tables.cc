// SPDX-License-Identifier: Apache-2.0
// Counting rows.
#include "suite/study/study_tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <initializer_list>
#include <map>
#include <string_view>
#include <utility>

namespace isoshard {
namespace {

using Choice = std::function<bool(const StudyRow&)>;

struct Check {
  std::string name;
  Choice alarms;
};

std::vector<Check> all_checks() {
  std::vector<Check> checks = {
      {"isoshard, exact", [](const StudyRow& row) { return row.exact; }},
      {"isoshard, within tolerance", [](const StudyRow& row) { return row.within; }}};
  for (const WeakCheck check : kWeakChecks)
    checks.push_back({std::string(name_of(check)), [check](const StudyRow& row) {
                        return row.weak[static_cast<std::size_t>(check)];
                      }});
  return checks;
}

bool is_clean(const StudyRow& row) {
  return row.index < 0;
}

std::int64_t count(const std::vector<StudyRow>& rows, const Choice& chooses) {
  return std::ranges::count_if(rows, chooses);
}

std::vector<StudyRow> chosen(const std::vector<StudyRow>& rows, const Choice& chooses) {
  std::vector<StudyRow> some;
  std::ranges::copy_if(rows, std::back_inserter(some), chooses);
  return some;
}

std::string percent(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? "-"
                    : fmt::format("{:.0f} %",
                                  100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

struct Group {
  std::string name;
  Choice has;
};

/// One row a group of runs, one column a check.
std::string table_of(std::string_view title, const std::vector<StudyRow>& bugs,
                     const std::vector<Group>& groups) {
  std::string text = fmt::format("| {} | runs |", title), rule = "|---|---|";
  for (const Check& check : all_checks()) {
    text += fmt::format(" {} |", check.name);
    rule += "---|";
  }
  text += "\n" + rule + "\n";
  for (const Group& group : groups) {
    const std::vector<StudyRow> some = chosen(bugs, group.has);
    const auto all = static_cast<std::int64_t>(some.size());
    if (all == 0) continue;
    text += fmt::format("| {} | {} |", group.name, all);
    for (const Check& check : all_checks())
      text += fmt::format(" {} |", percent(count(some, check.alarms), all));
    text += "\n";
  }
  return text + "\n";
}

std::vector<Group> points() {
  std::vector<Group> groups;
  for (const FaultPoint point :
       {FaultPoint::kForward, FaultPoint::kBackward, FaultPoint::kCollective, FaultPoint::kUpdate})
    groups.push_back({std::string(name_of(point)),
                      [point](const StudyRow& row) { return row.bug.point == point; }});
  groups.push_back({"all", [](const StudyRow&) { return true; }});
  return groups;
}

std::vector<Group> changes(std::initializer_list<FaultChange> some) {
  std::vector<Group> groups;
  for (const FaultChange change : some)
    groups.push_back({std::string(name_of(change)),
                      [change](const StudyRow& row) { return row.bug.change == change; }});
  return groups;
}

std::vector<Group> magnitudes() {
  std::vector<Group> groups;
  for (const double magnitude : kMagnitudes)
    groups.push_back({fmt::format("{:g}", magnitude),
                      [magnitude](const StudyRow& row) { return row.bug.magnitude == magnitude; }});
  for (Group& group :
       changes({FaultChange::kZero, FaultChange::kRoll, FaultChange::kRound, FaultChange::kSkip}))
    groups.push_back(std::move(group));
  return groups;
}

std::vector<Group> extents() {
  std::vector<Group> groups;
  for (const FaultExtent extent : {FaultExtent::kAll, FaultExtent::kPart, FaultExtent::kElement})
    groups.push_back({std::string(name_of(extent)),
                      [extent](const StudyRow& row) { return row.bug.extent == extent; }});
  return groups;
}

std::vector<Group> dtypes() {
  const auto is_bf16 = [](const StudyRow& row) {
    return row.case_slug.find("bf16") != std::string::npos;
  };
  return {{"fp32", std::not_fn(is_bf16)}, {"bf16", is_bf16}};
}

std::string places(const std::vector<StudyRow>& bugs) {
  const auto line = [](std::string_view name, std::int64_t right, std::int64_t all) {
    return fmt::format("| {} | {} | {} |\n", name, all, percent(right, all));
  };
  const auto is_right = [](std::optional<bool> StudyRow::*place) {
    return [place](const StudyRow& row) { return (row.*place).value_or(false); };
  };
  const auto is_told = [](std::optional<bool> StudyRow::*place) {
    return [place](const StudyRow& row) { return (row.*place).has_value(); };
  };
  return "| first finding | alarms on a named tensor | at that tensor |\n|---|---|---|\n" +
         line("isoshard, exact", count(bugs, is_right(&StudyRow::exact_place)),
              count(bugs, is_told(&StudyRow::exact_place))) +
         line("isoshard, within tolerance", count(bugs, is_right(&StudyRow::within_place)),
              count(bugs, is_told(&StudyRow::within_place))) +
         "\n";
}

constexpr std::array kGrades = {CauseGrade::kRight, CauseGrade::kPlaceOnly, CauseGrade::kWrong,
                                CauseGrade::kNone};

std::string grades_of(std::string_view title, const std::vector<StudyRow>& graded,
                      const std::vector<Group>& groups) {
  std::string text = fmt::format("| causes by {} | alarms |", title), rule = "|---|---|";
  for (const CauseGrade grade : kGrades) {
    text += fmt::format(" {} |", name_of(grade));
    rule += "---|";
  }
  text += "\n" + rule + "\n";
  for (const Group& group : groups) {
    const std::vector<StudyRow> some = chosen(graded, group.has);
    const auto all = static_cast<std::int64_t>(some.size());
    if (all == 0) continue;
    text += fmt::format("| {} | {} |", group.name, all);
    for (const CauseGrade grade : kGrades) {
      const auto is_so = [grade](const StudyRow& row) { return row.grade() == grade; };
      text += fmt::format(" {} |", percent(count(some, is_so), all));
    }
    text += "\n";
  }
  return text + "\n";
}

/// Whether the causes are the bugs, of runs that are alarmed within tolerances. Noise has no cause:
/// none is the right answer there, so it is counted by change alone.
std::string causes(const std::vector<StudyRow>& bugs) {
  const auto is_graded = [](const StudyRow& row) { return row.grade() != CauseGrade::kNotGraded; };
  const auto is_named = [](const StudyRow& row) { return row.bug.change != FaultChange::kNoise; };
  const std::vector<StudyRow> graded = chosen(bugs, is_graded), named = chosen(graded, is_named);
  return grades_of("change", graded,
                   changes({FaultChange::kScale, FaultChange::kShift, FaultChange::kZero,
                            FaultChange::kRoll, FaultChange::kRound, FaultChange::kSkip,
                            FaultChange::kNoise})) +
         grades_of("point, without noise", named, points()) +
         grades_of("extent, without noise", named, extents());
}

bool is_noise(const StudyRow& row) {
  return row.bug.change == FaultChange::kNoise && row.grade() != CauseGrade::kNotGraded;
}

std::string false_alarms(const std::vector<StudyRow>& clean) {
  std::string text = "| check | alarms on runs without a bug |\n|---|---|\n";
  for (const Check& check : all_checks())
    text +=
        fmt::format("| {} | {} of {} |\n", check.name, count(clean, check.alarms), clean.size());
  return text + "\n";
}

SharePanel panel_of(std::string title, const std::vector<StudyRow>& bugs) {
  SharePanel panel{.title = std::move(title)};
  for (auto magnitude = kMagnitudes.rbegin(); magnitude != kMagnitudes.rend(); ++magnitude)
    panel.places.push_back(fmt::format("{:g} %", 100 * *magnitude));
  for (const Check& check : all_checks()) {
    ShareLine line{.name = check.name};
    for (auto magnitude = kMagnitudes.rbegin(); magnitude != kMagnitudes.rend(); ++magnitude) {
      const std::vector<StudyRow> some =
          chosen(bugs, [&](const StudyRow& row) { return row.bug.magnitude == *magnitude; });
      line.shares.push_back(some.empty() ? std::optional<double>()
                                         : static_cast<double>(count(some, check.alarms)) /
                                               static_cast<double>(some.size()));
    }
    panel.lines.push_back(std::move(line));
  }
  return panel;
}

std::vector<StudyRow> bugs_of(const std::vector<StudyRow>& rows) {
  return chosen(rows, [](const StudyRow& row) { return !is_clean(row) && row.fired; });
}

}  // namespace

std::string study_tables(const std::vector<StudyRow>& rows) {
  const std::vector<StudyRow> bugs = bugs_of(rows), clean = chosen(rows, is_clean);
  const std::int64_t hidden = count(bugs, [](const StudyRow& row) { return !row.is_visible; });
  const std::int64_t idle = static_cast<std::int64_t>(rows.size() - clean.size() - bugs.size());
  std::string text = fmt::format(
      "{} bugs on {} cases. {} of them changed a bit that no record shows; {} compositions changed "
      "none.\n\n",
      bugs.size(), clean.size(), hidden, idle);
  text += table_of("point", bugs, points());
  text += table_of("change", bugs, magnitudes());
  text += table_of("extent", bugs, extents());
  text += table_of("dtype", bugs, dtypes());
  return text + places(bugs) + causes(bugs) + noise_table(rows) + false_alarms(clean);
}

std::string noise_table(const std::vector<StudyRow>& rows) {
  std::map<std::pair<CauseGrade, std::string_view>, std::int64_t> counts;
  for (const StudyRow& row : chosen(bugs_of(rows), is_noise))
    ++counts[{row.grade(), name_of(row.blame.cause.id)}];
  std::string text = "| what verdicts say of noise | alarms | grade |\n|---|---|---|\n";
  for (const auto& [said, alarms] : counts)
    text += fmt::format("| {} | {} | {} |\n", said.second.empty() ? "no cause" : said.second,
                        alarms, name_of(said.first));
  return text + "\n";
}

std::vector<SharePanel> sensitivity_panels(const std::vector<StudyRow>& rows) {
  const std::vector<StudyRow> bugs = bugs_of(rows);
  const auto is_element = [](const StudyRow& row) {
    return row.bug.extent == FaultExtent::kElement;
  };
  return {panel_of("Bugs in all or a quarter of a tensor: share that each check alarms",
                   chosen(bugs, std::not_fn(is_element))),
          panel_of("Bugs in one element", chosen(bugs, is_element))};
}

StudyFailures failures_of(const std::vector<StudyRow>& rows) {
  return {
      count(rows, [](const StudyRow& row) { return is_clean(row) && (row.exact || row.within); }),
      count(rows,
            [](const StudyRow& row) { return !is_clean(row) && row.is_visible && !row.exact; }),
      count(bugs_of(rows), [](const StudyRow& row) {
        const CauseId cause = row.blame.cause.id;
        return is_noise(row) && cause != CauseId::kNone && !tells_only_the_place(cause);
      })};
}

}  // namespace isoshard
