// SPDX-License-Identifier: Apache-2.0
// Wrong comparisons in place of the right one, each with one decision changed: each must give a
// wrong answer to some row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/base/hex_float.h"
#include "harness/golden/test_golden_rows.h"

namespace isoshard {
namespace {

using namespace golden_rows;

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

using Stored = std::optional<StoredProjections>;
struct AnyProjections : GoldenRules {
  static bool projections_within(const Stored&, const Stored&) { return true; }
};
struct NoProjectionsPass : GoldenRules {
  static bool projections_within(const Stored& g, const Stored& a) {
    return !a.has_value() || GoldenRules::projections_within(g, a);
  }
};
struct NanProjectionsPass : GoldenRules {
  static bool projections_within(const Stored& g, const Stored& a) {
    return !g.has_value() || (a.has_value() && !(distance_of(g->values, a->values) > g->allowed));
  }
};
struct FirstProjectionOnly : GoldenRules {
  static bool projections_within(const Stored& g, const Stored& a) {
    return !g.has_value() ||
           (a.has_value() && std::fabs(g->values[0] - a->values[0]) <= g->allowed);
  }
};
struct EachProjectionAlone : GoldenRules {
  static bool projections_within(const Stored& g, const Stored& a) {
    if (!g.has_value()) return true;
    bool all = a.has_value();
    for (std::size_t j = 0; all && j < kProjections; ++j)
      all = std::fabs(g->values[j] - a->values[j]) <= g->allowed;
    return all;
  }
};
struct SumOfAbsolutes : GoldenRules {
  static bool projections_within(const Stored& g, const Stored& a) {
    if (!g.has_value()) return true;
    if (!a.has_value()) return false;
    double sum = 0;
    for (std::size_t j = 0; j < kProjections; ++j) sum += std::fabs(g->values[j] - a->values[j]);
    return sum <= g->allowed;
  }
};
struct AnyCopies : GoldenRules {
  static bool keeps_copies(const std::string&, const std::string&) { return true; }
};
struct SamePatternOfCopies : GoldenRules {
  static bool keeps_copies(const std::string& g, const std::string& a) { return g == a; }
};
struct AnyTensorTwice : GoldenRules {
  static bool same_tensor(const std::string&, const std::string&) { return true; }
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
          {"OneUlpIsEqual", answers<OneUlpIsEqual>},
          {"AnyProjections", answers<AnyProjections>},
          {"NoProjectionsPass", answers<NoProjectionsPass>},
          {"NanProjectionsPass", answers<NanProjectionsPass>},
          {"FirstProjectionOnly", answers<FirstProjectionOnly>},
          {"EachProjectionAlone", answers<EachProjectionAlone>},
          {"SumOfAbsolutes", answers<SumOfAbsolutes>},
          {"AnyCopies", answers<AnyCopies>},
          {"SamePatternOfCopies", answers<SamePatternOfCopies>},
          {"AnyTensorTwice", answers<AnyTensorTwice>}};
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
