// SPDX-License-Identifier: Apache-2.0
// The envelope, number by number.
#include "harness/curve/curve_judge.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "harness/bundle/run_settings.h"
#include "harness/ids/rule.h"

namespace isoshard {
namespace {

CurveSpread larger(const CurveSpread& a, const CurveSpread& b) {
  return {std::max(a.loss, b.loss), std::max(a.rank_loss, b.rank_loss),
          std::max(a.grad_norm, b.grad_norm)};
}

CurveSpread difference(const CurveStep& a, const CurveStep& b) {
  CurveSpread spread{std::fabs(a.loss - b.loss), 0, std::fabs(a.grad_norm - b.grad_norm)};
  for (std::size_t i = 0; i < std::min(a.rank_losses.size(), b.rank_losses.size()); ++i)
    spread.rank_loss = std::max(spread.rank_loss, std::fabs(a.rank_losses[i] - b.rank_losses[i]));
  return spread;
}

/// What is allowed of one number.
struct Allowance {
  double value;
  std::string rule;
};

class Allowed {
 public:
  Allowed(const Curve& reference, const CurveBounds& bounds)
      : reference_(reference), bounds_(bounds) {}

  void next(std::size_t step) {
    if (!reference_.spreads.empty()) envelope_ = larger(envelope_, reference_.spreads.at(step));
  }
  [[nodiscard]] const CurveSpread& envelope() const noexcept { return envelope_; }
  [[nodiscard]] Allowance of(double reference, double envelope, double ceiling) const {
    if (reference_.spreads.empty()) {
      if (!bounds_.rtol.has_value()) return {0, "nothing: the reference has no perturbed runs"};
      return {*bounds_.rtol * std::fabs(reference),
              fmt::format("{:g} of the reference's value", *bounds_.rtol)};
    }
    const double spread = bounds_.factor * envelope,
                 floor = bounds_.relative_floor * std::fabs(reference);
    if (ceiling < std::max(spread, floor)) return {ceiling, "the most that is ever allowed"};
    if (spread < floor)
      return {floor, fmt::format("{:g} of the reference's value", bounds_.relative_floor)};
    return {spread, fmt::format("{:g} x the largest spread of {} perturbed runs up to this step",
                                bounds_.factor, reference_.perturbed_runs)};
  }

 private:
  const Curve& reference_;
  const CurveBounds& bounds_;
  CurveSpread envelope_;
};

CurveDeviation deviation_of(int step, std::string number, double reference, double actual,
                            const Allowance& allowed) {
  const bool equal = reference == actual;
  return {step,
          std::move(number),
          reference,
          actual,
          equal ? 0 : std::fabs(actual - reference),
          allowed.value,
          allowed.rule};
}

// A NaN deviation is not within anything.
bool is_within(const CurveDeviation& d) {
  return d.deviation <= d.allowed;
}

/// All numbers of one step, in the order in which a step makes them.
std::vector<CurveDeviation> deviations(const CurveStep& reference, const CurveStep& actual,
                                       const Allowed& allowed, double ceiling) {
  constexpr double kNoCeiling = std::numeric_limits<double>::infinity();
  const CurveSpread& envelope = allowed.envelope();
  const int step = reference.step;
  std::vector<CurveDeviation> result;
  result.push_back(deviation_of(step, "loss", reference.loss, actual.loss,
                                allowed.of(reference.loss, envelope.loss, ceiling)));
  // their numbers are equal: structure_problem
  for (std::size_t i = 0; i < reference.rank_losses.size(); ++i) {
    const double value = reference.rank_losses[i];
    result.push_back(deviation_of(step, fmt::format("loss of dp rank {}", i), value,
                                  actual.rank_losses[i],
                                  allowed.of(value, envelope.rank_loss, kNoCeiling)));
  }
  result.push_back(deviation_of(step, "grad_norm", reference.grad_norm, actual.grad_norm,
                                allowed.of(reference.grad_norm, envelope.grad_norm, kNoCeiling)));
  result.push_back(deviation_of(step, "learning_rate", reference.learning_rate,
                                actual.learning_rate, {0, "nothing"}));
  return result;
}

std::string in_words(const CurveDeviation& d) {
  return fmt::format(
      "step {}: {} is {:.9g} ({}), the reference's {:.9g} ({}); they differ by {:.3e}, at most "
      "{:.3e} is allowed: {}",
      d.step, d.number, d.actual, to_hex(d.actual), d.reference, to_hex(d.reference), d.deviation,
      d.allowed, d.rule);
}

/// A norm of nothing on one side only: one run left a step out that the other made.
std::string skipped_on_one_side(const Curve& actual, const CurveDeviation& d) {
  const auto is_nothing = [](double norm) { return norm == 0 || !std::isfinite(norm); };
  if (d.number != "grad_norm" || is_nothing(d.reference) == is_nothing(d.actual)) return "";
  if (!nlohmann::json::parse(actual.settings).contains("loss_scale")) return "";
  return fmt::format(
      "; with its loss scale {} skipped this step, as gradients overflowed, and the other did not: "
      "near fp16's largest number "
      "a sharded sum may overflow where another order does not (a smaller --loss-scale decides)",
      is_nothing(d.actual) ? "the run" : "the reference");
}

/// Both are fp64 sums of the same losses of samples.
constexpr double kRoundingsOfAMean = 1e-9;

bool is_mean_of_ranks(const CurveStep& step) {
  double sum = 0;
  for (const double loss : step.rank_losses) sum += loss;
  const double mean = sum / static_cast<double>(step.rank_losses.size());
  return std::fabs(mean - step.loss) <= kRoundingsOfAMean * std::fabs(step.loss);
}

/// Of one step, before numbers are compared; empty if nothing is wrong.
std::string problem_of_step(const Curve& reference, const Curve& actual, std::size_t i) {
  const CurveStep &wanted = reference.steps[i], &step = actual.steps[i];
  if (step.step != wanted.step)
    return fmt::format("its {}. step must be step {}, got step {}", i + 1, wanted.step, step.step);
  const std::size_t losses = static_cast<std::size_t>(
      num_rank_losses(actual).value_or(static_cast<int>(wanted.rank_losses.size())));
  if (step.rank_losses.size() != losses || losses != wanted.rank_losses.size() || losses == 0)
    return fmt::format(
        "step {}: it must have the loss of each of {} dp ranks, got {}; the reference has {}",
        step.step, losses, step.rank_losses.size(), wanted.rank_losses.size());
  return "";
}

/// How the loss of a step follows from those of its ranks is the settings' (counts, weights). Where
/// it is their mean in every step of the reference, it is in every other run.
std::string problem_of_means(const Curve& reference, const CurveVerdict& verdict,
                             const Curve& actual) {
  if (!std::ranges::all_of(reference.steps, is_mean_of_ranks)) return "";
  for (int i = 0; i < verdict.steps; ++i) {
    const CurveStep& step = actual.steps[static_cast<std::size_t>(i)];
    if (!is_mean_of_ranks(step))
      return fmt::format(
          "step {}: its loss {:.17g} must be the mean of the losses of its {} dp ranks, as it is "
          "in the reference",
          step.step, step.loss, step.rank_losses.size());
  }
  return "";
}

bool has_only_numbers(const CurveStep& step) {
  return is_finite(step) && std::isfinite(step.learning_rate) &&
         std::ranges::all_of(step.rank_losses, [](double loss) { return std::isfinite(loss); });
}

RunSettings settings_of(const Curve& curve) {
  const std::string wrapped =
      nlohmann::json({{"training", nlohmann::json::parse(curve.settings)}}).dump();
  return parse_run_settings(wrapped, curve_file_name(curve));
}

}  // namespace

std::string chaos_of(const Curve& reference, const CurveBounds& bounds) {
  CurveSpread envelope;
  for (std::size_t i = 0; i < reference.steps.size(); ++i) {
    const CurveStep& step = reference.steps[i];
    if (!is_finite(step))
      return fmt::format("the reference's own loss is {} and its gradient norm {} in step {}",
                         step.loss, step.grad_norm, step.step);
    if (!has_only_numbers(step))
      return fmt::format(
          "the reference's losses of dp ranks are {}, and its learning rate is {} in step {}",
          fmt::join(step.rank_losses, ", "), step.learning_rate, step.step);
    if (reference.spreads.empty()) continue;
    envelope = larger(envelope, reference.spreads.at(i));
    if (envelope.loss <= bounds.chaotic * std::fabs(step.loss)) continue;
    if (envelope.loss >= kUnboundedSpread) {
      return "the case is chaotic: not every run that differs by one ulp of every weight keeps "
             "finite numbers to the end; use a smaller "
             "learning rate, fewer steps or a larger batch";
    }
    return fmt::format(
        "the case is chaotic: by step {} runs that differ by one ulp of every weight are {:.3g} "
        "apart, {:.2g} % of the loss {:.6g} (at "
        "most "
        "{:g} % can be judged); use a smaller learning rate, fewer steps or a larger batch",
        step.step, envelope.loss, 100 * envelope.loss / std::fabs(step.loss), step.loss,
        100 * bounds.chaotic);
  }
  return "";
}

CurveVerdict judge_curve(const Curve& reference, const Curve& actual, const CurveBounds& bounds) {
  CurveVerdict verdict;
  verdict.label = label_of(actual);
  verdict.reason = chaos_of(reference, bounds);
  if (!verdict.reason.empty()) return verdict;
  if (reference.steps.empty()) {
    verdict.reason = "the reference has no steps";
    return verdict;
  }
  Allowed allowed(reference, bounds);
  std::string structure;
  const std::size_t steps = std::min(reference.steps.size(), actual.steps.size());
  for (std::size_t i = 0; i < steps && !verdict.first.has_value(); ++i) {
    allowed.next(i);
    structure = problem_of_step(reference, actual, i);
    if (!structure.empty()) break;
    for (const CurveDeviation& d :
         deviations(reference.steps[i], actual.steps[i], allowed, bounds.ceiling)) {
      if (d.number == "loss") verdict.allowed_losses.push_back(d.allowed);
      if (d.number == "loss" && !(d.deviation < verdict.largest.deviation)) verdict.largest = d;
      if (is_within(d)) {
        if (d.allowed > 0)
          verdict.largest_share = std::max(verdict.largest_share, d.deviation / d.allowed);
        continue;
      }
      verdict.first = d;
      break;
    }
    ++verdict.steps;
  }
  verdict.status = Status::kDiverges;
  if (verdict.first.has_value()) {
    verdict.reason = in_words(*verdict.first) + skipped_on_one_side(actual, *verdict.first);
  } else if (!structure.empty()) {
    verdict.reason = std::move(structure);
  } else if (std::string means = problem_of_means(reference, verdict, actual); !means.empty()) {
    verdict.reason = std::move(means);
  } else if (reference.steps.size() != actual.steps.size()) {
    verdict.reason = fmt::format("it has {} steps, the reference {}", actual.steps.size(),
                                 reference.steps.size());
  } else {
    verdict.status = Status::kConforms;
    const bool is_exact = reference.spreads.empty() && !bounds.rtol.has_value();
    verdict.strength = is_exact ? Strength::kExact : Strength::kWithinTolerance;
    verdict.reason = fmt::format(
        "{} steps; the loss goes from {:.6f} to {:.6f}; its largest deviation is {:.3e} in step "
        "{}, where {:.3e} is allowed",
        verdict.steps, actual.steps.front().loss, actual.steps.back().loss,
        verdict.largest.deviation, verdict.largest.step, verdict.largest.allowed);
  }
  return verdict;
}

std::vector<CurveSpread> spreads_of(const Curve& reference, const std::vector<Curve>& runs) {
  std::vector<CurveSpread> spreads(reference.steps.size());
  for (const Curve& run : runs) {
    if (run.steps.size() != reference.steps.size())
      throw Refused<UsageError>(
          said(RuleId::kPerturbedCurveSteps,
               {{"steps", reference.steps.size()}, {"got", run.steps.size()}}));
    for (std::size_t i = 0; i < spreads.size(); ++i)
      spreads[i] = larger(spreads[i], difference(reference.steps[i], run.steps[i]));
  }
  return spreads;
}

std::string render(const CurveVerdict& verdict) {
  const bool is_exact = verdict.strength == Strength::kExact;
  const char* const word =
      verdict.status != Status::kConforms
          ? (verdict.status == Status::kVacuous ? "VACUOUS " : "DIVERGES")
          : (is_exact ? "CONFORMS (exact: equal to its reference number by number)"
                      : "CONFORMS (within tolerance)");
  return fmt::format("{}  {}: {}\n", word, verdict.label, verdict.reason);
}

std::vector<std::string> differing_settings(const Curve& reference, const Curve& actual) {
  const RunSettings ours = settings_of(reference), theirs = settings_of(actual);
  std::vector<std::string> lines = differing_settings(ours, theirs, BatchFileOf::kEither);
  if (theirs.training.empty() && !ours.training.empty())
    lines.push_back(
        fmt::format("settings: the reference states {}, actual states none", ours.training.size()));
  for (const auto& [key, what] : {std::pair{kInitialWeightsKey, "initial weights"},
                                  std::pair{kBatchesKey, "token ids and labels"}}) {
    const auto wanted = reference.fingerprint.find(std::string(key)),
               found = actual.fingerprint.find(std::string(key));
    if (wanted == reference.fingerprint.end()) continue;
    if (found == actual.fingerprint.end()) {
      lines.push_back(fmt::format("{}: reference {}, actual does not say ({})", what,
                                  wanted->second.substr(0, 16), key));
      continue;
    }
    if (wanted->second == found->second) continue;
    lines.push_back(fmt::format("{} differ: reference {}, actual {} ({})", what,
                                wanted->second.substr(0, 16), found->second.substr(0, 16), key));
  }
  return lines;
}

void refuse_different_settings(const Curve& reference, const Curve& actual) {
  if (!reference.steps.empty() && !actual.steps.empty() &&
      reference.steps.front().step != actual.steps.front().step) {
    throw Refused<UsageError>(
        said(RuleId::kCurvesBeginElsewhere, {{"reference", label_of(reference)},
                                             {"first", reference.steps.front().step},
                                             {"actual", label_of(actual)},
                                             {"other", actual.steps.front().step}}));
  }
  const std::vector<std::string> lines = differing_settings(reference, actual);
  if (lines.empty()) return;
  throw Refused<UsageError>(
      said(RuleId::kCurveSettingsDiffer,
           {{"reference", label_of(reference)},
            {"actual", label_of(actual)},
            {"settings", lines},
            NamedValue::words("differences", fmt::format("{}", fmt::join(lines, "\n  ")))}));
}

}  // namespace isoshard
