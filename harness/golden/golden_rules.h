// SPDX-License-Identifier: Apache-2.0
/// The comparison of goldens, with its decisions as a template parameter. A mutation test replaces
/// each decision by a wrong one and shows that it is caught.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/base/hex_float.h"
#include "harness/golden/compare_golden.h"

namespace isoshard {

/// Every decision of compare_golden.
struct GoldenRules {
  static bool rounds_alike(const Golden& golden, const Golden& actual) {
    return golden.arithmetic == actual.arithmetic;
  }
  static std::size_t first_line() { return 0; }
  static std::size_t num_lines(std::size_t golden, std::size_t actual) {
    return std::max(golden, actual);
  }
  static std::size_t num_numbers(std::size_t golden, std::size_t actual) {
    return std::max(golden, actual);
  }
  static bool same_name(const std::string& golden, const std::string& actual) {
    return golden == actual;
  }
  static bool same_digest(const std::string& golden, const std::string& actual) {
    return golden == actual;
  }
  /// Equal bits have equal norms, in every order of adding the squares.
  static bool digest_vouches(const std::string& digest) { return !digest.empty(); }
  static bool is_number(double value) { return std::isfinite(value); }
  static bool same_value(double golden, double actual) {
    return std::bit_cast<std::uint64_t>(golden) == std::bit_cast<std::uint64_t>(actual);
  }
  /// Written so that a NaN is not within.
  static bool within(double golden, double actual, double drift) {
    return std::fabs(actual - golden) <= drift;
  }
  /// A number may differ only where machines round differently, and there only within its drift.
  static bool may_differ(bool rounds_alike, bool within) { return !rounds_alike && within; }
  /// Where the golden has projections the run must have them, near enough. A NaN is not.
  static bool projections_within(const std::optional<StoredProjections>& golden,
                                 const std::optional<StoredProjections>& actual) {
    return !golden.has_value() ||
           (actual.has_value() && distance_of(golden->values, actual->values) <= golden->allowed);
  }
  /// Ranks that are copies in the golden are copies on every machine.
  static bool keeps_copies(const std::string& golden, const std::string& actual) {
    return broken_copy(golden, actual).empty();
  }
  /// The digests of two lines of the run that are one tensor in the golden.
  static bool same_tensor(const std::string& first, const std::string& again) {
    return first == again;
  }
  /// Digests have no distance: the numbers beside one are judged for it.
  static bool digest_may_differ(bool rounds_alike, bool has_numbers) {
    return !rounds_alike && has_numbers;
  }
};

namespace detail {

template <class Rules>
class GoldenComparer {
 public:
  GoldenComparer(const Golden& golden, const Golden& actual) : golden_(golden), actual_(actual) {
    result_.rounds_alike = Rules::rounds_alike(golden, actual);
  }

  GoldenComparison compare() {
    const std::size_t count = Rules::num_lines(golden_.lines.size(), actual_.lines.size());
    for (index_ = Rules::first_line(); index_ < count && !is_wrong_; ++index_) {
      differs_ = false;
      compare_lines();
      ++result_.lines;
      result_.unequal_lines += differs_ ? 1 : 0;
    }
    const bool equal = result_.unequal_lines == 0;
    result_.answer = is_wrong_ ? GoldenAnswer::kRegression
                     : equal   ? GoldenAnswer::kMatch
                               : GoldenAnswer::kDrift;
    return result_;
  }

 private:
  static constexpr double kNoDistance = std::numeric_limits<double>::quiet_NaN();

  void compare_lines() {
    if (index_ >= golden_.lines.size() || index_ >= actual_.lines.size()) {
      note(false, "the line", name_at(golden_.lines), name_at(actual_.lines), kNoDistance, 0);
      return;
    }
    const GoldenLine &golden = golden_.lines[index_], &actual = actual_.lines[index_];
    if (!Rules::same_name(golden.name, actual.name)) {
      note(false, "the line", golden.name, actual.name, kNoDistance, 0);
      return;
    }
    compare_copies(golden, actual);
    if (is_wrong_) return;
    if (Rules::digest_vouches(golden.digest) && Rules::same_digest(golden.digest, actual.digest))
      return;
    if (!Rules::same_digest(golden.digest, actual.digest)) {
      const bool may = Rules::digest_may_differ(result_.rounds_alike, !golden.numbers.empty());
      note(may, "digest", golden.digest, actual.digest, kNoDistance, 0);
    }
    const std::size_t count = Rules::num_numbers(golden.numbers.size(), actual.numbers.size());
    for (std::size_t i = 0; i < count && !is_wrong_; ++i) {
      if (i < golden.numbers.size() && i < actual.numbers.size()) {
        compare_numbers(golden.numbers[i], actual.numbers[i]);
      } else {
        note(false, "the number", name_of_number(golden.numbers, i),
             name_of_number(actual.numbers, i), kNoDistance, 0);
      }
    }
    if (!is_wrong_) compare_projections(golden, actual);
  }

  /// What is equal within the run on every machine, whatever its bits are.
  void compare_copies(const GoldenLine& golden, const GoldenLine& actual) {
    if (!Rules::keeps_copies(golden.copies, actual.copies))
      note(false, "copies: " + broken_copy(golden.copies, actual.copies), golden.copies,
           actual.copies.empty() ? "no two equal" : actual.copies, kNoDistance, 0);
    if (golden.same_as.empty() || is_wrong_) return;
    for (std::size_t i = 0; i < index_; ++i) {
      if (golden_.lines[i].name != golden.same_as) continue;
      if (!Rules::same_tensor(actual_.lines[i].digest, actual.digest))
        note(false, "the same tensor as " + golden.same_as, "equal digests",
             actual_.lines[i].digest + " and " + actual.digest, kNoDistance, 0);
      return;
    }
  }

  void compare_projections(const GoldenLine& golden, const GoldenLine& actual) {
    if (!golden.projections.has_value()) {
      const bool may_hide =
          !golden.digest.empty() && !golden.numbers.empty() && golden.numbers.front().value != 0;
      result_.without_projections += may_hide ? 1 : 0;
      return;
    }
    const bool has = actual.projections.has_value();
    const double allowed = golden.projections->allowed,
                 distance =
                     has ? distance_of(golden.projections->values, actual.projections->values)
                         : kNoDistance;
    if (!Rules::projections_within(golden.projections, actual.projections)) {
      note(false, "projections", "as recorded", has ? "too far from them" : "none", distance,
           allowed);
    } else {
      result_.largest_projected = std::max(result_.largest_projected, distance / allowed);
    }
  }

  void compare_numbers(const GoldenNumber& golden, const GoldenNumber& actual) {
    if (!Rules::same_name(golden.name, actual.name)) {
      note(false, "the number", golden.name, actual.name, kNoDistance, 0);
      return;
    }
    const double distance = std::fabs(actual.value - golden.value);
    if (Rules::is_number(actual.value) && Rules::same_value(golden.value, actual.value)) return;
    const bool within = Rules::within(golden.value, actual.value, golden.drift);
    const bool may =
        Rules::is_number(actual.value) && Rules::may_differ(result_.rounds_alike, within);
    note(may, golden.name, to_hex(golden.value), to_hex(actual.value), distance, golden.drift);
    if (may && golden.drift > 0)
      result_.largest_share = std::max(result_.largest_share, distance / golden.drift);
  }

  void note(bool may_differ, const std::string& what, std::string golden, std::string actual,
            double difference, double drift) {
    differs_ = true;
    is_wrong_ = is_wrong_ || !may_differ;
    if (may_differ && result_.first.has_value()) return;
    const bool has_line = index_ < golden_.lines.size();
    std::string line = has_line ? golden_.lines[index_].name : actual_.lines[index_].name;
    result_.first = GoldenDifference{
        index_, std::move(line), what, std::move(golden), std::move(actual), difference, drift};
  }

  [[nodiscard]] std::string name_at(const std::vector<GoldenLine>& lines) const {
    return index_ < lines.size() ? lines[index_].name : "none";
  }
  static std::string name_of_number(const std::vector<GoldenNumber>& numbers, std::size_t i) {
    return i < numbers.size() ? numbers[i].name : "none";
  }

  const Golden &golden_, &actual_;
  GoldenComparison result_;
  std::size_t index_ = 0;
  bool differs_ = false;   // this line
  bool is_wrong_ = false;  // the run
};

}  // namespace detail

template <class Rules>
[[nodiscard]] GoldenComparison compare_golden_by(const Golden& golden, const Golden& actual) {
  return detail::GoldenComparer<Rules>(golden, actual).compare();
}

}  // namespace isoshard
