// SPDX-License-Identifier: Apache-2.0
// The three answers, and their text.
#include "harness/golden/compare_golden.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>
#include <set>

#include "core/base/hex_float.h"
#include "harness/golden/golden_rules.h"

namespace isoshard {
namespace {

std::string in_words(const GoldenDifference& d) {
  const std::string place =
      fmt::format("{}: {}: golden {}, here {}", d.line, d.what, d.golden, d.actual);
  if (d.what == "projections" && std::isfinite(d.difference))
    return fmt::format(
        "{}: {}: {:.3g} from the golden's, and {:.3g} may be drift: elements have "
        "other places, signs or values",
        d.line, d.what, d.difference, d.drift);
  const auto golden = parse_hex(d.golden), actual = parse_hex(d.actual);
  if (d.what == "digest" || !golden.has_value() || !actual.has_value()) return place;
  return fmt::format("{} ({:.9g} and {:.9g}: {:.3e} apart, {:.3g} ulp; {:.3e} may be drift)", place,
                     *golden, *actual, d.difference, ulps_between(*golden, *actual), d.drift);
}

std::string without_projections_in_words(const Golden& golden, const GoldenComparison& comparison) {
  if (comparison.without_projections == 0) return "";
  return fmt::format(
      "            weak  {} lines have a norm and no projections, so that elements in other places "
      "would pass; record it anew: isoshard golden record {}\n",
      comparison.without_projections, golden.name);
}

}  // namespace

std::string_view name_of(GoldenAnswer answer) noexcept {
  switch (answer) {
    case GoldenAnswer::kMatch:
      return "match";
    case GoldenAnswer::kDrift:
      return "drift";
    case GoldenAnswer::kRegression:
      break;
  }
  return "regression";
}

GoldenComparison compare_golden(const Golden& golden, const Golden& actual) {
  return compare_golden_by<GoldenRules>(golden, actual);
}

std::string staleness(const Golden& golden, const Golden& actual) {
  std::vector<std::string> reasons;
  std::set<std::string> names;
  for (const auto* config : {&golden.config, &actual.config}) {
    for (const auto& [name, value] : *config) names.insert(name);
  }
  const auto value_in = [](const Golden& g, const std::string& name) {
    const auto found = g.config.find(name);
    return found == g.config.end() ? std::string("not set") : found->second;
  };
  for (const std::string& name : names) {
    const std::string before = value_in(golden, name), now = value_in(actual, name);
    if (before != now) reasons.push_back(fmt::format("{}: golden {}, here {}", name, before, now));
  }
  if (golden.weights_sha256 != actual.weights_sha256)
    reasons.push_back(fmt::format("SHA-256 of the initial weights: golden {}, here {}",
                                  golden.weights_sha256, actual.weights_sha256));
  if (golden.inputs_sha256 != actual.inputs_sha256)
    reasons.push_back(fmt::format("SHA-256 of the inputs: golden {}, here {}", golden.inputs_sha256,
                                  actual.inputs_sha256));
  return fmt::format("{}", fmt::join(reasons, "\n  "));
}

std::string differing_fingerprints(const Golden& golden, const Golden& actual) {
  std::vector<std::string> lines;
  for (const auto& [key, value] : golden.fingerprint) {
    const auto found = actual.fingerprint.find(key);
    const std::string here = found == actual.fingerprint.end() ? "unknown" : found->second;
    if (here != value) lines.push_back(fmt::format("{}: golden {}, here {}", key, value, here));
  }
  if (golden.arithmetic != actual.arithmetic)
    lines.push_back(
        fmt::format("arithmetic digest: golden {}, here {}", golden.arithmetic, actual.arithmetic));
  return fmt::format("{}", fmt::join(lines, "\n            "));
}

double ulps_between(double a, double b) noexcept {
  if (std::isnan(a) || std::isnan(b) || std::signbit(a) != std::signbit(b))
    return std::numeric_limits<double>::infinity();
  const auto x = std::bit_cast<std::int64_t>(std::fabs(a)),
             y = std::bit_cast<std::int64_t>(std::fabs(b));
  return static_cast<double>(x > y ? x - y : y - x);
}

std::string render(const Golden& golden, const Golden& actual, const GoldenComparison& comparison,
                   const std::string& look_further) {
  const std::string fingerprints = differing_fingerprints(golden, actual);
  switch (comparison.answer) {
    case GoldenAnswer::kMatch:
      return fmt::format("MATCH       {}: {} lines, every bit\n", golden.name, comparison.lines);
    case GoldenAnswer::kDrift:
      return fmt::format(
          "DRIFT       {}: {} of {} lines differ, each within its recorded drift (at most {:.2g} "
          "of it, and {:.2g} of what projections may differ by); this machine rounds "
          "differently\n"
          "            {}\n            first {}\n{}",
          golden.name, comparison.unequal_lines, comparison.lines, comparison.largest_share,
          comparison.largest_projected, fingerprints, in_words(*comparison.first),
          without_projections_in_words(golden, comparison));
    case GoldenAnswer::kRegression:
      break;
  }
  return fmt::format(
      "REGRESSION  {}: first {}\n            {}{}{}look further: {}\n", golden.name,
      in_words(*comparison.first),
      comparison.rounds_alike
          ? "this machine rounds as the golden's did, so every bit must be equal\n            "
          : "",
      fingerprints, fingerprints.empty() ? "" : "\n            ", look_further);
}

}  // namespace isoshard
