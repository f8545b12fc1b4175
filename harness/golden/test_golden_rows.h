// SPDX-License-Identifier: Apache-2.0
/// Test helper: what runs may say instead of a golden's numbers, and what must be answered.
#pragma once
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "harness/golden/compare_golden.h"
#include "harness/golden/golden_rules.h"

namespace isoshard::golden_rows {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN(),
                        kInf = std::numeric_limits<double>::infinity();
inline constexpr double kDrift = 0x1p-20;
inline constexpr int kSteps = 6;
inline constexpr const char* kElsewhere = "00000000000000ee";

inline Golden curve() {
  Golden golden;
  golden.name = "curve_x";
  golden.arithmetic = "00000000000000aa";
  golden.fingerprint = {{"cpu", "A"}};
  for (int step = 0; step < kSteps; ++step) {
    const double loss = 3.25 - 0.125 * step;
    golden.lines.push_back(
        {"step " + std::to_string(step),
         "",
         {{"loss", loss, kDrift}, {"grad_norm", 0.5 + step, kDrift}, {"learning_rate", 0.1, 0}}});
  }
  golden.lines[3].numbers[1].value = 0.0;
  return golden;
}

inline Golden digests() {
  Golden golden = curve();
  golden.lines = {{"data ids", "0000000000000001", {}},
                  {"forward at norm", "0000000000000002", {{"norm", 8, kDrift}}},
                  {"gradient of norm", "0000000000000003", {{"norm", 2, kDrift}}}};
  return golden;
}

inline constexpr double kAllowed = 0x1p-10;

/// As digests(), but of two ranks that are copies, with projections and with a tensor that is seen
/// twice.
inline Golden projected() {
  Golden golden = digests();
  for (std::size_t i = 1; i < golden.lines.size(); ++i) {
    golden.lines[i].projections = StoredProjections{{1, -2, 3, -4, 5, -6, 7, -8}, kAllowed};
    golden.lines[i].copies = "aab-";
  }
  golden.lines.push_back(golden.lines[1]);
  golden.lines[3].name = "forward at head";
  golden.lines[3].same_as = "forward at norm";
  return golden;
}

/// What a run says instead of the golden's numbers, and what must be answered.
struct Row {
  std::string name;
  Golden golden, actual;
  GoldenAnswer answer = GoldenAnswer::kMatch;
  std::string line;  ///< the first difference's; empty for a match
};

using Edit = std::function<void(Golden&)>;

inline Row row(std::string name, const Golden& golden, const Edit& edit, GoldenAnswer answer,
               std::string line = "") {
  Row made{std::move(name), golden, golden, answer, std::move(line)};
  edit(made.actual);
  return made;
}

inline Golden elsewhere(Golden golden) {
  golden.arithmetic = kElsewhere;
  return golden;
}

inline double up(double value) {
  return std::nextafter(value, kInf);
}

/// The same edit on a machine that rounds as the golden's, and on another one.
inline void add_on_both(std::vector<Row>& rows, const std::string& name, const Golden& golden,
                        const Edit& edit, GoldenAnswer alike, GoldenAnswer other,
                        const std::string& line) {
  rows.push_back(row(name, golden, edit, alike, line));
  const auto moved = [&edit](Golden& g) {
    g.arithmetic = kElsewhere;
    edit(g);
  };
  rows.push_back(row(name + " elsewhere", golden, moved, other, line));
}

inline std::vector<Row> rows() {
  constexpr auto kMatch = GoldenAnswer::kMatch, kDrifts = GoldenAnswer::kDrift,
                 kWrong = GoldenAnswer::kRegression;
  std::vector<Row> all;
  add_on_both(
      all, "equal", curve(), [](Golden&) {}, kMatch, kMatch, "");
  add_on_both(
      all, "digests equal", digests(), [](Golden&) {}, kMatch, kMatch, "");
  for (const int step : {0, 2, kSteps - 1}) {
    const std::string line = "step " + std::to_string(step);
    const auto number = [step](Golden& g, std::size_t i) -> double& {
      return g.lines[static_cast<std::size_t>(step)].numbers[i].value;
    };
    add_on_both(
        all, "one ulp at " + line, curve(), [&](Golden& g) { number(g, 0) = up(number(g, 0)); },
        kWrong, kDrifts, line);
    add_on_both(
        all, "one ulp down at " + line, curve(),
        [&](Golden& g) { number(g, 1) = std::nextafter(number(g, 1), -kInf); }, kWrong, kDrifts,
        line);
    add_on_both(
        all, "the whole drift at " + line, curve(), [&](Golden& g) { number(g, 0) += kDrift; },
        kWrong, kDrifts, line);
    add_on_both(
        all, "an ulp above the drift at " + line, curve(),
        [&](Golden& g) { number(g, 0) = up(number(g, 0) + kDrift); }, kWrong, kWrong, line);
    add_on_both(
        all, "twice the drift down at " + line, curve(),
        [&](Golden& g) { number(g, 0) -= 2 * kDrift; }, kWrong, kWrong, line);
    add_on_both(
        all, "a norm twice the drift off at " + line, curve(),
        [&](Golden& g) { number(g, 1) += 2 * kDrift; }, kWrong, kWrong, line);
    add_on_both(
        all, "another learning rate at " + line, curve(),
        [&](Golden& g) { number(g, 2) = up(0.1); }, kWrong, kWrong, line);
    for (const double value : {kNan, kInf, -kInf})
      add_on_both(
          all, "no number at " + line, curve(), [&](Golden& g) { number(g, 0) = value; }, kWrong,
          kWrong, line);
  }
  add_on_both(
      all, "a zero of another sign", curve(), [](Golden& g) { g.lines[3].numbers[1].value = -0.0; },
      kWrong, kDrifts, "step 3");
  add_on_both(
      all, "the last step dropped", curve(), [](Golden& g) { g.lines.pop_back(); }, kWrong, kWrong,
      "step 5");
  add_on_both(
      all, "the first step dropped", curve(), [](Golden& g) { g.lines.erase(g.lines.begin()); },
      kWrong, kWrong, "step 0");
  add_on_both(
      all, "a step added", curve(),
      [](Golden& g) {
        g.lines.push_back({"step 6", "", g.lines[5].numbers});
      },
      kWrong, kWrong, "step 6");
  add_on_both(
      all, "no step at all", curve(), [](Golden& g) { g.lines.clear(); }, kWrong, kWrong, "step 0");
  add_on_both(
      all, "a step of another name", curve(), [](Golden& g) { g.lines[4].name = "step 9"; }, kWrong,
      kWrong, "step 4");
  add_on_both(
      all, "a number dropped", curve(), [](Golden& g) { g.lines[4].numbers.pop_back(); }, kWrong,
      kWrong, "step 4");
  add_on_both(
      all, "a number added", curve(),
      [](Golden& g) {
        g.lines[4].numbers.push_back({"x", 1, 0});
      },
      kWrong, kWrong, "step 4");
  add_on_both(
      all, "a number of another name", curve(), [](Golden& g) { g.lines[4].numbers[0].name = "x"; },
      kWrong, kWrong, "step 4");
  add_on_both(
      all, "another digest", digests(), [](Golden& g) { g.lines[1].digest = "0000000000000009"; },
      kWrong, kDrifts, "forward at norm");
  add_on_both(
      all, "another digest of what is equal everywhere", digests(),
      [](Golden& g) { g.lines[0].digest = "0000000000000009"; }, kWrong, kWrong, "data ids");
  add_on_both(
      all, "another digest and norm", digests(),
      [](Golden& g) {
        g.lines[2].digest = "0000000000000009";
        g.lines[2].numbers[0].value += 2 * kDrift;
      },
      kWrong, kWrong, "gradient of norm");
  add_on_both(
      all, "a norm that an equal digest vouches for", digests(),
      [](Golden& g) { g.lines[1].numbers[0].value = up(8); }, kMatch, kMatch, "");
  const auto differ = [](Golden& g) {
    for (const std::size_t i : {1U, 3U}) g.lines[i].digest = "0000000000000009";
  };
  add_on_both(
      all, "projections equal", projected(), [](Golden&) {}, kMatch, kMatch, "");
  add_on_both(
      all, "another digest, projections near", projected(),
      [&](Golden& g) {
        differ(g);
        for (double& sum : g.lines[1].projections->values) sum += 0.35 * kAllowed;
      },
      kWrong, kDrifts, "forward at norm");
  add_on_both(
      all, "each projection half of the allowed distance off", projected(),
      [&](Golden& g) {
        differ(g);
        for (double& sum : g.lines[1].projections->values) sum -= 0.5 * kAllowed;
      },
      kWrong, kWrong, "forward at norm");
  for (const std::size_t j : {0U, 7U}) {
    add_on_both(
        all, "one projection too far off", projected(),
        [&](Golden& g) {
          differ(g);
          g.lines[3].projections->values[j] += 1.01 * kAllowed;
        },
        kWrong, kWrong, "");
    all[all.size() - 2].line = "forward at norm";  // where machines round alike its digest is first
    all.back().line = "forward at head";
  }
  add_on_both(
      all, "a projection that is no number", projected(),
      [&](Golden& g) {
        differ(g);
        g.lines[1].projections->values[2] = kNan;
      },
      kWrong, kWrong, "forward at norm");
  add_on_both(
      all, "no projections", projected(),
      [&](Golden& g) {
        differ(g);
        g.lines[1].projections.reset();
      },
      kWrong, kWrong, "forward at norm");
  add_on_both(
      all, "projections that an equal digest vouches for", projected(),
      [](Golden& g) { g.lines[1].projections->values[0] += 2 * kAllowed; }, kMatch, kMatch, "");
  for (const char* letters : {"abc-", "aba-", "abb-", "aa--", "aabc", "", "aab"})
    add_on_both(
        all, std::string("copies that are none: ") + letters, projected(),
        [&](Golden& g) { g.lines[1].copies = letters; }, kWrong, kWrong, "forward at norm");
  add_on_both(
      all, "ranks that were no copies and are", projected(),
      [](Golden& g) { g.lines[1].copies = "aaa-"; }, kMatch, kMatch, "");
  add_on_both(
      all, "a tensor seen twice that differs the second time", projected(),
      [](Golden& g) { g.lines[3].digest = "0000000000000009"; }, kWrong, kWrong, "forward at head");
  add_on_both(
      all, "a tensor seen twice that differs the first time", projected(),
      [](Golden& g) { g.lines[1].digest = "0000000000000009"; }, kWrong, kWrong, "forward at norm");
  all.back().line = "forward at head";
  // Both sides: a golden with NaN in it is not read (GoldenStoreFolder), but nothing may pass by it
  // either.
  Golden nan = curve();
  nan.lines[2].numbers[0].value = kNan;
  add_on_both(
      all, "the same NaN on both sides", nan, [](Golden&) {}, kWrong, kWrong, "step 2");
  return all;
}

template <class Rules>
bool answers(const Row& r) {
  const GoldenComparison said = compare_golden_by<Rules>(r.golden, r.actual);
  return said.answer == r.answer && (said.first.has_value() ? said.first->line : "") == r.line;
}

}  // namespace isoshard::golden_rows
