// SPDX-License-Identifier: Apache-2.0
/// Steps that follow another rule: moments with other factors, a step that AdamW does not make of
/// right moments, a parameter without gradient that is changed.
///
/// A moment is a x the one before + c x the gradient (or its square); a and c are fitted to the
/// reference and to the run. A step of AdamW is made again from the reference's moments, first as
/// it should be, which must give the reference's step, and then by each rule that is taken for it.
#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/causes/diagnosis.h"
#include "harness/causes/view/adam_rule.h"
#include "harness/ids/phrase.h"
#include "harness/trace/run_view.h"
#include "harness/verdict/neighbours.h"

namespace isoshard::detail {
namespace {

constexpr std::int64_t kLeastClear = 12;

/// With which factors the moment before and the gradient are in a moment.
struct MomentFactors {
  double before = 0, gradient = 0;
};

/// Nothing if no factors explain what a rank holds, or should hold.
std::optional<MomentFactors> factors_in(const Values& moment, const Values& before,
                                        const Values& gradient) {
  constexpr double kUnexplained = 1e-3;
  const double size = norm_of(moment);
  if (!is_telling(moment) || !is_telling(gradient)) return std::nullopt;
  MomentFactors factors;
  if (norm_of(before) == 0) {
    factors.gradient = dot(moment, gradient) / dot(gradient, gradient);
  } else {
    const std::vector<double> fitted = best_weights(
        stacked(std::vector{before.flattened(), gradient.flattened()}), moment.flattened());
    factors = {fitted[0], fitted[1]};
  }
  const Values made = factors.before * before + factors.gradient * gradient;
  return distance(made, moment) <= kUnexplained * size ? std::optional(factors) : std::nullopt;
}

std::string moment_in_words(const MomentFactors& factors, bool has_before, bool is_squared) {
  const NamedValues values = {{"before", factors.before},
                              {"gradient", factors.gradient},
                              {"power", is_squared ? "^2" : ""}};
  return phrase(has_before ? PhraseId::kMomentOfBoth : PhraseId::kMomentOfGradient, values);
}

/// Whether the factors are those of the other moment.
bool has_other_beta(const Evidence& e, const MomentFactors& seen, bool has_before,
                    bool is_squared) {
  if (!e.options.step_rule.has_value()) return false;
  const double own = is_squared ? e.options.step_rule->beta2 : e.options.step_rule->beta1,
               other = is_squared ? e.options.step_rule->beta1 : e.options.step_rule->beta2;
  return own != other && is_near(seen.gradient, 1 - other, 0.01) &&
         (!has_before || is_near(seen.before, other, 1e-3));
}

/// A parameter after its step, of the one before, the moments and the rule's numbers.
using MadeStep = std::function<double(double old, double m, double v)>;

MadeStep with_denominator(const AdamRule& rule, double updates1, double updates2,
                          const std::function<double(double v, double correction2)>& denominator) {
  const double correction1 = updates1 == 0 ? 1 : AdamRule::correction(rule.beta1, updates1),
               correction2 = updates2 == 0 ? 1 : AdamRule::correction(rule.beta2, updates2);
  return [=](double old, double m, double v) {
    return old * rule.kept() - rule.rate / correction1 * m / denominator(v, correction2);
  };
}

/// Updates of 0 mean no correction.
MadeStep made_by(const AdamRule& rule, double updates1, double updates2, double eps) {
  return with_denominator(rule, updates1, updates2, [eps](double v, double correction2) {
    return std::sqrt(v / correction2) + eps;
  });
}

/// What a wrong rank has of the parameter, and what its step is made of.
struct OwnStep {
  Values old, m, v, right, seen;
};

/// Of each wrong rank; empty if something is missing, or the moments are wrong in the run.
std::vector<OwnStep> own_steps(const Evidence& e) {
  const std::string name(stepped_parameter(e.wanted.key));
  const RecordKey before = before_step(e.wanted.key),
                  m{e.wanted.key.step, RecordKind::kOptimizer,
                    to_string({name, NameRole::kState, "exp_avg"}), 0},
                  v{e.wanted.key.step, RecordKind::kOptimizer,
                    to_string({name, NameRole::kState, "exp_avg_sq"}), 0};
  for (const RecordKey& key : {before, m, v}) {
    const Record* const record = e.reference.find(key);
    if (record == nullptr || record->layout.global_shape != e.wanted.layout.global_shape) return {};
    if (!e.is_right(key)) return {};
  }
  const Values old = e.reference_value(before), first = e.reference_value(m),
               second = e.reference_value(v);
  std::vector<OwnStep> steps;
  for (const View* view : e.bad_views()) {
    const auto cut = [&](const Values& whole) {
      return whole.cut(view->box.global_offset, view->box.size).contiguous();
    };
    steps.push_back({cut(old), cut(first), cut(second), view->expected.contiguous(),
                     view->actual.contiguous()});
  }
  return steps;
}

double made_at(const OwnStep& own, const MadeStep& made, std::size_t i) {
  return made(own.old.flat()[i], own.m.flat()[i], own.v.flat()[i]);
}

/// Whether the step as it should be gives the reference's.
bool gives_reference(const OwnStep& own, const MadeStep& made) {
  constexpr double kUnexplained = 0.01;
  double left = 0, size = 0;
  for (std::size_t i = 0; i < own.old.flat().size(); ++i) {
    left += std::pow(made_at(own, made, i) - own.right.flat()[i], 2);
    size += std::pow(own.right.flat()[i] - own.old.flat()[i], 2);
  }
  return left <= kUnexplained * kUnexplained * size && size > 0;
}

/// Whether each element that is clearly wrong is what the step gives.
/// `of_step`: what a step may be off by, besides roundings, in units of it.
bool explains_step(const Evidence& e, const OwnStep& own, const MadeStep& made,
                   double of_step = 1e-3) {
  constexpr double kUnexplained = 0.03, kOfElement = 0.1;
  const double rounding = e.options.coarsest == Dtype::kFloat64 ? 0x1p-50 : 0x1p-22;
  double left = 0, wrong = 0;
  std::int64_t clear = 0;
  for (std::size_t i = 0; i < own.old.flat().size(); ++i) {
    const double seen = own.seen.flat()[i], right = own.right.flat()[i], old = own.old.flat()[i];
    const double off = seen - made_at(own, made, i);
    const double noise = rounding * std::fabs(old) + of_step * std::fabs(right - old);
    if (std::fabs(off) > kOfElement * std::fabs(seen - right) + noise) return false;
    if (std::fabs(seen - right) > 2 * noise) ++clear;
    left += off * off;
    wrong += std::pow(seen - right, 2);
  }
  return clear >= kLeastClear && left <= kUnexplained * kUnexplained * wrong;
}

/// The eps that the elements which are most wrong have; nothing if it is the rule's own, or below
/// 0.
std::optional<double> other_eps(const OwnStep& own, const AdamRule& rule) {
  constexpr std::size_t kLooked = 9;
  const double correction1 = rule.correction1(), correction2 = rule.correction2();
  std::vector<std::pair<double, double>> found;  // how wrong, eps
  for (std::size_t i = 0; i < own.old.flat().size(); ++i) {
    const double step = own.old.flat()[i] * rule.kept() - own.seen.flat()[i];
    if (step == 0) continue;
    const double eps =
        rule.rate / correction1 * own.m.flat()[i] / step - std::sqrt(own.v.flat()[i] / correction2);
    found.emplace_back(std::fabs(own.seen.flat()[i] - own.right.flat()[i]), eps);
  }
  std::ranges::sort(found, std::greater());
  found.resize(std::min(found.size(), kLooked));
  if (found.empty()) return std::nullopt;
  std::ranges::sort(found, {}, &std::pair<double, double>::second);
  const double eps = found[found.size() / 2].second;
  return eps > 0 && !is_near(eps, rule.eps, 0.05) ? std::optional(eps) : std::nullopt;
}

Cause other_rule(const Evidence& e, const std::vector<OwnStep>& steps, const AdamRule& rule) {
  const double t = rule.updates;
  const NamedValue where = e.on_bad_ranks();
  std::vector<std::pair<Cause, MadeStep>> candidates = {
      {make_cause(CauseId::kEpsInsideRoot, {{"eps", rule.eps}, where}),
       with_denominator(
           rule, t, t,
           [&](double v, double correction2) { return std::sqrt(v / correction2 + rule.eps); })},
      {make_cause(CauseId::kEpsInsideUncorrectedRoot, {{"eps", rule.eps}, where}),
       with_denominator(
           rule, t, t,
           [&](double v, double correction2) { return std::sqrt((v + rule.eps) / correction2); })},
      {make_cause(CauseId::kRootMissing, {where}),
       with_denominator(rule, t, t,
                        [&](double v, double correction2) { return v / correction2 + rule.eps; })},
      {make_cause(CauseId::kFirstMomentUncorrected, {where}), made_by(rule, 0, t, rule.eps)},
      {make_cause(CauseId::kSecondMomentUncorrected, {where}), made_by(rule, t, 0, rule.eps)},
      {make_cause(CauseId::kMomentsUncorrected, {where}), made_by(rule, 0, 0, rule.eps)}};
  for (const double other : {t - 1, t + 1, t - 2, t + 2, 1.0}) {
    if (other >= 1 && other != t)
      candidates.emplace_back(
          make_cause(CauseId::kCorrectionOfOtherUpdate, {{"used", other}, {"update", t}, where}),
          made_by(rule, other, other, rule.eps));
  }
  if (const auto eps = other_eps(steps.front(), rule))
    candidates.emplace_back(
        make_cause(CauseId::kOtherEps, {{"used", *eps}, {"eps", rule.eps}, where}),
        made_by(rule, t, t, *eps));
  for (const auto& [cause, made] : candidates) {
    if (std::ranges::all_of(steps, [&](const OwnStep& own) { return explains_step(e, own, made); }))
      return cause;
  }
  if (rule.kept() == 1) return {};
  // off by so little of a step that the moments must be right to more digits
  const MadeStep decayed = [right = made_by(rule, t, t, rule.eps), kept = rule.kept()](
                               double old, double m, double v) {
    return right(old / kept, m, v) * kept;
  };
  const bool is_decayed = std::ranges::all_of(steps, [&](const OwnStep& own) {
    return explains_step(e, own, decayed, 0.1 * rule.rate * rule.decay);
  });
  return is_decayed ? make_cause(CauseId::kDecayBehindStep, {where}) : Cause();
}

}  // namespace

Cause cause_not_skipped(const Evidence& e) {
  const RecordKey& key = e.wanted.key;
  if ((key.kind != RecordKind::kOptimizer && stage_of(key) != Stage::kParameterAfterStep) ||
      !RunView(e.reference).is_skipped(key.step) ||
      !e.is_right(scalar_key(key.step, NameRole::kFoundInf)) || !e.whole.defined())
    return {};
  RecordKey before = before_step(key);
  if (key.kind == RecordKind::kOptimizer && stepped_parameter(key).empty())
    before = {key.step - 1, key.kind, key.name, 0};
  const bool is_kept = e.reference.find(before) != nullptr && e.is_right(before) &&
                       equal(e.reference_value(before), e.whole);
  return is_kept ? make_cause(CauseId::kStepNotSkipped, {e.on_bad_ranks()}) : Cause();
}

Cause cause_of_unwanted(const Reference& reference, const RecordKey& key) {
  // It may be made without a step, as zeros are at the start.
  return key.kind == RecordKind::kOptimizer && RunView(reference).is_skipped(key.step)
             ? make_cause(CauseId::kStateOfSkippedStep)
             : Cause();
}

namespace {

/// Whether the other moment of the parameter is off as if the gradient had this factor. Another
/// beta changes one moment alone, or both by numbers of their own.
bool gradient_has_factor(const Evidence& e, bool is_squared, double factor_of_gradient) {
  RecordName name = parsed(e.wanted.key);
  name.state = is_squared ? "exp_avg" : "exp_avg_sq";
  const RecordKey other{e.wanted.key.step, RecordKind::kOptimizer, to_string(name), 0};
  if (e.reference.find(other) == nullptr) return false;
  const Values whole = e.reference_value(other);
  if (whole.shape() != e.wanted.layout.global_shape) return false;
  const double factor = is_squared ? factor_of_gradient : factor_of_gradient * factor_of_gradient;
  return std::ranges::all_of(e.bad_ranks(), [&](int rank) {
    const Held* const held = e.held_by(rank);
    const Record* const record = held == nullptr ? nullptr : held->rank->find(other);
    const auto own = record == nullptr ? std::nullopt : e.own_box(*held->rank, *record);
    if (!own.has_value()) return false;
    const Values right = whole.cut(own->first.global_offset, own->first.size);
    return is_near(norm_of(own->second), factor * norm_of(right), 0.01);
  });
}

}  // namespace

Cause cause_in_moments(const Evidence& e) {
  const std::string& name = e.wanted.key.name;
  const std::string_view state = state_of(e.wanted.key);
  const bool is_squared = state == "exp_avg_sq";
  if (!is_squared && state != "exp_avg" && state != "momentum_buffer") return {};
  const RecordKey before{e.wanted.key.step - 1, RecordKind::kOptimizer, name, 0};
  const std::string parameter(parsed(e.wanted.key).base);
  const RecordKey gradient{e.wanted.key.step, RecordKind::kGrad, parameter, 0};
  RecordKey clipped = gradient;
  clipped.name = to_string({parameter, NameRole::kClipped});
  const Record* const record = e.reference.find(gradient);
  const bool is_known = record != nullptr &&
                        record->layout.global_shape == e.wanted.layout.global_shape &&
                        e.is_right(before) && e.is_right(gradient) && e.is_right(clipped);
  const std::vector<const View*> bad = e.bad_views();
  if (!is_known || bad.empty()) return {};
  Values grad = e.reference_value(gradient) / record->grad_scale / e.clip_ratio();
  if (is_squared) grad = grad * grad;
  const bool has_before = e.reference.find(before) != nullptr;
  const Values old = has_before ? e.reference_value(before) : Values::zeros(grad.shape());
  if (old.shape() != grad.shape()) return {};
  const auto right = factors_in(e.whole, old, grad);
  if (!right.has_value()) return {};
  std::optional<MomentFactors> seen;
  for (const View* view : bad) {
    const Shape &offset = view->box.global_offset, &size = view->box.size;
    const auto own = factors_in(view->actual, old.cut(offset, size), grad.cut(offset, size));
    const bool fits =
        own.has_value() && (!seen.has_value() || (std::fabs(own->before - seen->before) < 1e-3 &&
                                                  is_near(own->gradient, seen->gradient, 0.01)));
    if (!fits) return {};
    seen = own;
  }
  const bool is_same_decay = !has_before || std::fabs(seen->before - right->before) < 1e-4;
  const double factor = seen->gradient / right->gradient;
  if (is_same_decay && is_near(factor, 1, 1e-3)) return {};
  const bool is_other_beta = has_other_beta(e, *seen, has_before, is_squared);
  // a gradient that enters with a number of the run has words of its own
  const CauseId scale = e.scale_cause(factor).id;
  const bool is_formula = scale != CauseId::kScale && scale != CauseId::kScaleNearOne;
  if (is_same_decay && !is_other_beta && (is_formula || !has_before)) return {};
  const double of_gradient = is_squared ? std::sqrt(std::fabs(factor)) : factor;
  if (!has_before && gradient_has_factor(e, is_squared, of_gradient)) return {};
  NamedValues values = {{"state", state},
                        {"gradient_factor", seen->gradient},
                        {"right_gradient_factor", right->gradient},
                        NamedValue::words("seen", moment_in_words(*seen, has_before, is_squared)),
                        NamedValue::words("right", moment_in_words(*right, has_before, is_squared)),
                        e.on_bad_ranks()};
  if (has_before) {
    values.emplace_back("before_factor", seen->before);
    values.emplace_back("right_before_factor", right->before);
  }
  if (!is_other_beta) return make_cause(CauseId::kMomentWithOtherFactors, std::move(values));
  values.emplace_back("used_beta", is_squared ? 1 : 2);
  values.emplace_back("own_beta", is_squared ? 2 : 1);
  return make_cause(CauseId::kMomentWithOtherBeta, std::move(values));
}

Cause cause_in_rule(const Evidence& e) {
  const std::vector<AdamRule> rules = adam_rules_of(e.reference, e.options, e.wanted.key);
  if (rules.empty()) return {};
  const std::vector<OwnStep> steps = own_steps(e);
  if (steps.empty()) return {};
  const auto rule = std::ranges::find_if(rules, [&](const AdamRule& candidate) {
    const MadeStep right = made_by(candidate, candidate.updates, candidate.updates, candidate.eps);
    return std::ranges::all_of(steps,
                               [&](const OwnStep& own) { return gives_reference(own, right); });
  });
  return rule == rules.end() ? Cause() : other_rule(e, steps, *rule);
}

namespace {
/// Whether gradients of a step are recorded at all.
bool has_gradients(const Reference& reference, int step) {
  return std::ranges::any_of(reference.trace().ranks.at(0).records, [step](const Record& record) {
    return record.key.step == step && record.key.kind == RecordKind::kGrad &&
           !is_gradient_besides(record.key);
  });
}
}  // namespace

Cause cause_of_untrained(const Evidence& e) {
  const std::string name(stepped_parameter(e.wanted.key));
  const RecordKey before = before_step(e.wanted.key);
  if (e.wanted.key.kind != RecordKind::kParam || name.empty() ||
      e.reference.find({e.wanted.key.step, RecordKind::kGrad, name, 0}) != nullptr ||
      !has_gradients(e.reference, e.wanted.key.step) || e.reference.find(before) == nullptr ||
      !e.is_right(before) || !equal(e.reference_value(before), e.whole))
    return {};
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty()) return {};
  std::optional<double> common;
  const bool is_scaled = std::ranges::all_of(bad, [&](const View* view) {
    const double squares = dot(view->expected, view->expected);
    if (squares == 0) return false;
    const double off = dot(view->actual - view->expected, view->expected) / squares;
    const bool fits = e.explains_each((1 + off) * view->expected, *view) &&
                      is_near(off, common.value_or(off), 0.02);
    common = common.value_or(off);
    return fits && is_telling(view->expected);
  });
  if (!is_scaled) return make_cause(CauseId::kUntrainedChanged, {e.on_bad_ranks()});
  const std::vector<AdamRule> rules = adam_rules_of(e.reference, e.options, e.wanted.key);
  if (!rules.empty() && is_near(-*common, rules.front().rate * rules.front().decay, 0.02))
    return make_cause(
        CauseId::kUntrainedDecayed,
        {{"rate", rules.front().rate}, {"decay", rules.front().decay}, e.on_bad_ranks()});
  return make_cause(CauseId::kUntrainedScaled, {{"factor", 1 + *common}, e.on_bad_ranks()});
}

}  // namespace isoshard::detail
