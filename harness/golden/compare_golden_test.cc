// SPDX-License-Identifier: Apache-2.0
// The three answers, and wrong comparisons in place of the
// right one: each must give a wrong answer to some row of the same table.
#include "harness/golden/compare_golden.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/base/hex_float.h"
#include "harness/golden/golden_rules.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN(),
                 kInf = std::numeric_limits<double>::infinity();
constexpr double kDrift = 0x1p-20;
constexpr int kSteps = 6;
constexpr const char* kElsewhere = "00000000000000ee";

Golden curve() {
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

Golden digests() {
  Golden golden = curve();
  golden.lines = {{"data ids", "0000000000000001", {}},
                  {"forward at norm", "0000000000000002", {{"norm", 8, kDrift}}},
                  {"gradient of norm", "0000000000000003", {{"norm", 2, kDrift}}}};
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

Row row(std::string name, const Golden& golden, const Edit& edit, GoldenAnswer answer,
        std::string line = "") {
  Row made{std::move(name), golden, golden, answer, std::move(line)};
  edit(made.actual);
  return made;
}

Golden elsewhere(Golden golden) {
  golden.arithmetic = kElsewhere;
  return golden;
}

double up(double value) {
  return std::nextafter(value, kInf);
}

/// The same edit on a machine that rounds as the golden's, and on another one.
void add_on_both(std::vector<Row>& rows, const std::string& name, const Golden& golden,
                 const Edit& edit, GoldenAnswer alike, GoldenAnswer other,
                 const std::string& line) {
  rows.push_back(row(name, golden, edit, alike, line));
  const auto moved = [&edit](Golden& g) {
    g.arithmetic = kElsewhere;
    edit(g);
  };
  rows.push_back(row(name + " elsewhere", golden, moved, other, line));
}

std::vector<Row> rows() {
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

TEST(GoldenAnswers, AreRightForEveryRow) {
  for (const Row& r : rows()) {
    const GoldenComparison said = compare_golden(r.golden, r.actual);

    EXPECT_EQ(name_of(said.answer), name_of(r.answer)) << r.name;
    EXPECT_EQ(said.first.has_value() ? said.first->line : "", r.line) << r.name;
    EXPECT_TRUE(answers<GoldenRules>(r)) << r.name;
  }
}

TEST(GoldenAnswers, ARegressionShowsStepBothHexValuesAndTheCommand) {
  const Golden golden = curve();
  Golden actual = golden;
  actual.lines[2].numbers[0].value = up(3.0);
  actual.lines[4].numbers[0].value = 7;

  const std::string text =
      render(golden, actual, compare_golden(golden, actual), "isoshard verify --steps 3");

  EXPECT_THAT(
      text, AllOf(HasSubstr("REGRESSION  curve_x"),
                  HasSubstr("first step 2: loss: golden 0x1.8000000000000p+1, here "
                            "0x1.8000000000001p+1"),
                  HasSubstr("1 ulp"), HasSubstr("every bit must be equal"),
                  HasSubstr("look further: isoshard verify --steps 3"), Not(HasSubstr("step 4"))));
}

TEST(GoldenAnswers, ADriftShowsWhatDiffersBetweenTheMachines) {
  const Golden golden = curve();
  Golden actual = elsewhere(golden);
  actual.fingerprint["cpu"] = "B";
  actual.lines[2].numbers[0].value += kDrift / 2;

  const GoldenComparison comparison = compare_golden(golden, actual);
  const std::string text = render(golden, actual, comparison, "");

  EXPECT_DOUBLE_EQ(comparison.largest_share, 0.5);
  EXPECT_THAT(text,
              AllOf(HasSubstr("DRIFT"), HasSubstr("1 of 6 lines differ"),
                    HasSubstr("cpu: golden A, here B"),
                    HasSubstr("arithmetic digest: golden 00000000000000aa, here 00000000000000ee"),
                    HasSubstr("first step 2")));
}

TEST(GoldenAnswers, AnotherConfigWeightsOrInputsAreStaleNotWrong) {
  Golden golden = curve();
  golden.config = {{"dtype", "\"fp32\""}, {"seed", "1"}};
  golden.weights_sha256 = "a";
  Golden actual = golden;
  EXPECT_EQ(staleness(golden, actual), "");
  actual.config = {{"dtype", "\"bf16\""}, {"steps", "3"}};
  actual.weights_sha256 = "b";
  actual.inputs_sha256 = "c";

  EXPECT_THAT(
      staleness(golden, actual),
      AllOf(HasSubstr("dtype: golden \"fp32\", here \"bf16\""),
            HasSubstr("seed: golden 1, here not set"), HasSubstr("steps: golden not set, here 3"),
            HasSubstr("weights: golden a, here b"), HasSubstr("inputs")));
}

TEST(GoldenAnswers, UlpsAreStepsOfADouble) {
  EXPECT_EQ(ulps_between(1.0, 1.0), 0);
  EXPECT_EQ(ulps_between(1.0, up(up(1.0))), 2);
  EXPECT_EQ(ulps_between(-1.0, -up(1.0)), 1);
  EXPECT_EQ(ulps_between(0.0, -0.0), kInf);
  EXPECT_EQ(ulps_between(1.0, kNan), kInf);
}

// ---- mutants: each changes one decision
// ------------------------------------------------------------------------------------------

struct InvertedSame : GoldenRules {
  static bool same_value(double g, double a) { return !GoldenRules::same_value(g, a); }
};
struct InvertedWithin : GoldenRules {
  static bool within(double g, double a, double drift) { return !GoldenRules::within(g, a, drift); }
};
struct InvertedMachine : GoldenRules {
  static bool rounds_alike(const Golden& g, const Golden& a) {
    return !GoldenRules::rounds_alike(g, a);
  }
};
struct MachinesAlwaysAlike : GoldenRules {
  static bool rounds_alike(const Golden&, const Golden&) { return true; }
};
struct MachinesNeverAlike : GoldenRules {
  static bool rounds_alike(const Golden&, const Golden&) { return false; }
};
struct DriftAnywhere : GoldenRules {
  static bool may_differ(bool, bool within) { return within; }
};
struct AnythingElsewhere : GoldenRules {
  static bool may_differ(bool rounds_alike, bool) { return !rounds_alike; }
};
struct WithinOrElsewhere : GoldenRules {
  static bool may_differ(bool rounds_alike, bool within) { return !rounds_alike || within; }
};
struct NothingMayDiffer : GoldenRules {
  static bool may_differ(bool, bool) { return false; }
};
struct SkipsTheFirst : GoldenRules {
  static std::size_t first_line() { return 1; }
};
struct SkipsTheLast : GoldenRules {
  static std::size_t num_lines(std::size_t g, std::size_t a) {
    return std::max<std::size_t>(std::max(g, a), 1) - 1;
  }
};
struct CommonLinesOnly : GoldenRules {
  static std::size_t num_lines(std::size_t g, std::size_t a) { return std::min(g, a); }
};
struct GoldenLinesOnly : GoldenRules {
  static std::size_t num_lines(std::size_t g, std::size_t) { return g; }
};
struct ActualLinesOnly : GoldenRules {
  static std::size_t num_lines(std::size_t, std::size_t a) { return a; }
};
struct FirstNumberOnly : GoldenRules {
  static std::size_t num_numbers(std::size_t g, std::size_t a) {
    return std::min<std::size_t>(1, std::max(g, a));
  }
};
struct CommonNumbersOnly : GoldenRules {
  static std::size_t num_numbers(std::size_t g, std::size_t a) { return std::min(g, a); }
};
struct AnyName : GoldenRules {
  static bool same_name(const std::string&, const std::string&) { return true; }
};
struct AnyDigest : GoldenRules {
  static bool same_digest(const std::string&, const std::string&) { return true; }
};
struct DigestsMayDiffer : GoldenRules {
  static bool digest_may_differ(bool, bool has_numbers) { return has_numbers; }
};
struct PortableDigestsMayDiffer : GoldenRules {
  static bool digest_may_differ(bool rounds_alike, bool) { return !rounds_alike; }
};
struct NoDigestVouches : GoldenRules {
  static bool digest_vouches(const std::string&) { return false; }
};
struct AnyDigestVouches : GoldenRules {
  static bool digest_vouches(const std::string&) { return true; }
};
struct NanIsANumber : GoldenRules {
  static bool is_number(double) { return true; }
};
struct NanEqualsNan : NanIsANumber {
  static bool same_value(double g, double a) {
    return (std::isnan(g) && std::isnan(a)) || GoldenRules::same_value(g, a);
  }
};
struct NanIsWithin : NanIsANumber {
  static bool within(double g, double a, double drift) { return !(std::fabs(a - g) > drift); }
};
struct InfinityIsANumber : GoldenRules {
  static bool is_number(double value) { return !std::isnan(value); }
  static bool within(double g, double a, double drift) {
    return std::isinf(a) || GoldenRules::within(g, a, drift);
  }
};
struct TenTimesTheDrift : GoldenRules {
  static bool within(double g, double a, double drift) {
    return GoldenRules::within(g, a, 10 * drift);
  }
};
struct OpenBound : GoldenRules {
  static bool within(double g, double a, double drift) { return std::fabs(a - g) < drift; }
};
struct OneSidedUp : GoldenRules {
  static bool within(double g, double a, double drift) { return a - g <= drift; }
};
struct OneSidedDown : GoldenRules {
  static bool within(double g, double a, double drift) { return g - a <= drift; }
};
struct FloorOfDrift : GoldenRules {
  static bool within(double g, double a, double drift) {
    return GoldenRules::within(g, a, std::max(drift, 1e-15));
  }
};
struct ValuesNotBits : GoldenRules {
  static bool same_value(double g, double a) { return g == a; }
};
struct AsFloats : GoldenRules {
  static bool same_value(double g, double a) {
    return static_cast<float>(g) == static_cast<float>(a) && std::signbit(g) == std::signbit(a);
  }
};
struct OneUlpIsEqual : GoldenRules {
  static bool same_value(double g, double a) { return ulps_between(g, a) <= 1; }
};

struct Mutant {
  std::string name;
  bool (*answers)(const Row&);
};

std::vector<Mutant> mutants() {
  return {{"InvertedSame", answers<InvertedSame>},
          {"InvertedWithin", answers<InvertedWithin>},
          {"InvertedMachine", answers<InvertedMachine>},
          {"MachinesAlwaysAlike", answers<MachinesAlwaysAlike>},
          {"MachinesNeverAlike", answers<MachinesNeverAlike>},
          {"DriftAnywhere", answers<DriftAnywhere>},
          {"AnythingElsewhere", answers<AnythingElsewhere>},
          {"WithinOrElsewhere", answers<WithinOrElsewhere>},
          {"NothingMayDiffer", answers<NothingMayDiffer>},
          {"SkipsTheFirst", answers<SkipsTheFirst>},
          {"SkipsTheLast", answers<SkipsTheLast>},
          {"CommonLinesOnly", answers<CommonLinesOnly>},
          {"GoldenLinesOnly", answers<GoldenLinesOnly>},
          {"ActualLinesOnly", answers<ActualLinesOnly>},
          {"FirstNumberOnly", answers<FirstNumberOnly>},
          {"CommonNumbersOnly", answers<CommonNumbersOnly>},
          {"AnyName", answers<AnyName>},
          {"AnyDigest", answers<AnyDigest>},
          {"DigestsMayDiffer", answers<DigestsMayDiffer>},
          {"PortableDigestsMayDiffer", answers<PortableDigestsMayDiffer>},
          {"NoDigestVouches", answers<NoDigestVouches>},
          {"AnyDigestVouches", answers<AnyDigestVouches>},
          {"NanEqualsNan", answers<NanEqualsNan>},
          {"NanIsWithin", answers<NanIsWithin>},
          {"InfinityIsANumber", answers<InfinityIsANumber>},
          {"TenTimesTheDrift", answers<TenTimesTheDrift>},
          {"OpenBound", answers<OpenBound>},
          {"OneSidedUp", answers<OneSidedUp>},
          {"OneSidedDown", answers<OneSidedDown>},
          {"FloorOfDrift", answers<FloorOfDrift>},
          {"ValuesNotBits", answers<ValuesNotBits>},
          {"AsFloats", answers<AsFloats>},
          {"OneUlpIsEqual", answers<OneUlpIsEqual>}};
}

TEST(GoldenMutants, EachIsCaughtByARow) {
  const std::vector<Row> all = rows();
  for (const Mutant& mutant : mutants()) {
    const auto caught =
        std::count_if(all.begin(), all.end(), [&](const Row& r) { return !mutant.answers(r); });

    EXPECT_GT(caught, 0)
        << mutant.name
        << ": a comparison with this decision changed gives the right answer to every row";
    RecordProperty(mutant.name, static_cast<int>(caught));
  }
}

}  // namespace
}  // namespace isoshard
