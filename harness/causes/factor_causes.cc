// SPDX-License-Identifier: Apache-2.0
/// Factors: one for each rank, or one for each summand.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/causes/run_causes.h"
#include "harness/ids/phrase.h"

namespace isoshard::detail {
namespace {

constexpr double kNear = 1e-3;

/// Factors by the coordinate on an axis, if the coordinate alone says them.
std::optional<std::map<int, double>> by_coordinate(const Evidence& e,
                                                   const std::map<int, double>& of_rank,
                                                   Axis axis) {
  std::map<int, double> factors;
  for (const auto& [rank, factor] : of_rank) {
    const auto [known, is_new] = factors.emplace(e.actual.mesh.coordinate(rank, axis), factor);
    if (!is_new && !is_near(factor, known->second, kNear)) return std::nullopt;
  }
  return std::cmp_equal(factors.size(), e.actual.mesh.degree(axis)) ? std::optional(factors)
                                                                    : std::nullopt;
}

/// The cause of factors by the coordinate on an axis: which numbers of the run they are, or
/// kFactorPerRank if none.
Cause factors_along(const Evidence& e, Axis axis, const std::vector<double>& factors) {
  const auto n = static_cast<double>(factors.size());
  const auto fits = [&](const auto& right) {
    for (std::size_t i = 0; i < factors.size(); ++i) {
      if (!is_near(factors[i], right(i), kNear)) return false;
    }
    return true;
  };
  NamedValues values = {{"axis", name_of(axis)}, {"degree", factors.size()}, {"factors", factors}};
  if (axis == Axis::kDp) {
    const std::vector<double> counts =
        counted_targets(e, static_cast<std::int64_t>(factors.size()));
    const double all = std::accumulate(counts.begin(), counts.end(), 0.0);
    if (!counts.empty() && std::ranges::all_of(counts, [](double count) { return count > 0; })) {
      const auto of_tokens = [&](CauseId id) {
        values.emplace_back("token_counts", counts);
        return make_cause(id, std::move(values));
      };
      if (fits([&](std::size_t i) { return all / (n * counts[i]); }))
        return of_tokens(CauseId::kDividesByOwnCount);
      if (fits([&](std::size_t i) { return n * counts[i] / all; }))
        return of_tokens(CauseId::kWeightedByOwnCount);
    }
  }
  if (fits([](std::size_t i) { return static_cast<double>(i + 1); }))
    return make_cause(CauseId::kScaledByRankPlusOne, std::move(values));
  std::vector<std::string> formulas, equations;
  bool are_known = true;
  for (const double factor : factors) {
    if (is_near(factor, 1, kNear)) continue;
    const auto formula = e.formula_of(factor, kNear);
    are_known = formula.has_value();
    if (!are_known) break;
    formulas.push_back(*formula);
    equations.push_back(
        phrase(PhraseId::kTimesOfFormula, {{"times", factor}, {"formula", *formula}}));
  }
  values.push_back(NamedValue::words("along", phrase(PhraseId::kAlong, {{"axis", name_of(axis)}})));
  if (!are_known || formulas.empty()) return make_cause(CauseId::kFactorPerRank, std::move(values));
  values.emplace_back("formulas", formulas);
  values.push_back(NamedValue::words("behind", fmt::format("{}", fmt::join(equations, "; "))));
  return make_cause(CauseId::kFactorPerRankOfFormula, std::move(values));
}

/// What backward of each dp rank begins from, in the right run: its part of the mean over all
/// tokens, or the mean over its own. Empty if neither gives the reference's value.
std::vector<double> backward_parts(const Evidence& e, int ranks) {
  const RecordKey means_key = scalar_key(e.wanted.key.step, NameRole::kLossPerDpRank);
  if (e.reference.find(means_key) == nullptr || e.whole.numel() != 1) return {};
  const Values means = e.reference_value(means_key).flattened();
  if (means.numel() != ranks) return {};
  std::vector<double> own(means.flat().begin(), means.flat().end()), of_all = own;
  const std::vector<double> counts = counted_targets(e, ranks);
  const double all = std::accumulate(counts.begin(), counts.end(), 0.0);
  if (all == 0) return {};
  for (std::size_t i = 0; i < own.size(); ++i) of_all[i] = own[i] * ranks * counts[i] / all;
  for (const std::vector<double>& parts : {of_all, own}) {
    const double mean = std::accumulate(parts.begin(), parts.end(), 0.0) / ranks;
    if (is_near(mean, e.whole.item(), 1e-4)) return parts;
  }
  return {};
}

/// The number that each dp rank holds its part of a mean in; empty if ranks of one coordinate
/// differ, or one of them is missing.
std::vector<double> held_parts(const Evidence& e, int ranks) {
  std::map<int, double> parts;
  for (const Held& held : e.held) {
    const bool is_kept = held.record->kept && held.rank->arena != nullptr;
    const Values own = is_kept ? Values(held.rank->tensor(*held.record)) : Values();
    if (!own.defined() || own.numel() != 1) return {};
    const double part = own.item() / held.record->grad_scale;
    const auto [known, is_new] =
        parts.emplace(e.actual.mesh.coordinate(held.rank->rank, Axis::kDp), part);
    if (!is_new && !is_near(part, known->second, kNear)) return {};
  }
  std::vector<double> values;
  values.reserve(parts.size());
  for (const auto& [coordinate, part] : parts) values.push_back(part);
  return std::cmp_equal(values.size(), ranks) ? values : std::vector<double>{};
}

/// An earlier activation of the same micro-batch.
struct Summand {
  std::string name;
  Values values;
};

/// Activations of the tensor's shape before it, nearest first, each value once.
std::vector<Summand> summands_before(const Evidence& e) {
  constexpr std::size_t kMost = 9;
  std::vector<const Record*> before;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    if (record.key == e.wanted.key) break;
    if (record.key.kind == e.wanted.key.kind && record.key.step == e.wanted.key.step &&
        record.key.call == e.wanted.key.call &&
        record.layout.global_shape == e.wanted.layout.global_shape)
      before.push_back(&record);
  }
  std::vector<Summand> found;
  for (auto record = before.rbegin(); record != before.rend() && found.size() < kMost; ++record) {
    Values values = e.reference_value((*record)->key) / (*record)->grad_scale;
    // a module's output is often that of its last part: the shorter name says more
    const auto same = std::ranges::find_if(
        found, [&](const Summand& other) { return equal(other.values, values); });
    if (same == found.end() && is_telling(values))
      found.push_back({(*record)->key.name, std::move(values)});
  }
  return found;
}

/// The fewest of the summands, two or three, whose sum is the reference's value up to rounding: of
/// several the nearest.
std::vector<const Summand*> decomposition(const Evidence& e, const std::vector<Summand>& all) {
  const double near = (e.is_wide() ? 1e-5 : 8e-3) * norm_of(e.whole);
  std::vector<const Summand*> best;
  double least = near;
  const auto look_at = [&](double error, std::vector<const Summand*> summands) {
    if (!(error < least)) return;
    least = error;
    best = std::move(summands);
  };
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = i + 1; j < all.size(); ++j)
      look_at(distance(all[i].values + all[j].values, e.whole), {&all[i], &all[j]});
  }
  if (!best.empty()) return best;
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t j = i + 1; j < all.size(); ++j) {
      const Values rest = e.whole - (all[i].values + all[j].values);
      for (std::size_t k = j + 1; k < all.size(); ++k)
        look_at(distance(all[k].values, rest), {&all[i], &all[j], &all[k]});
    }
  }
  return best;
}

std::optional<std::vector<double>> weights_on(const Evidence& e, const View& view,
                                              const std::vector<const Summand*>& summands) {
  std::vector<Values> rows;
  for (const Summand* summand : summands)
    rows.push_back(summand->values.cut(view.box.global_offset, view.box.size).flattened());
  const Values matrix = stacked(rows);
  if (view.actual.numel() < 16 * matrix.size(0)) return std::nullopt;
  std::vector<double> weights = best_weights(matrix, view.actual);
  if (!e.explains_each(weighted_sum(matrix, weights).reshape(view.actual.shape()), view))
    return std::nullopt;
  return weights;
}

}  // namespace

Cause cause_rank_factors(const Evidence& e) {
  const std::vector<const View*> bad = e.bad_views();
  if (bad.size() < 2 || e.views.size() < 2) return {};
  std::map<int, double> of_rank;
  for (const Held& held : e.held) {
    const View* view = e.view_of(held.rank->rank);
    if (view == nullptr) {
      // what was not kept is right
      if (std::ranges::find(e.bad_ranks(), held.rank->rank) != e.bad_ranks().end()) return {};
      of_rank[held.rank->rank] = 1;
      continue;
    }
    const auto factor = e.factor_on(*view);
    if (!factor.has_value()) return {};
    of_rank[held.rank->rank] = *factor;
  }
  // what a rank's part fits is as noisy as its values
  const double noise = std::clamp(e.tolerance(), kNear, 0.01);
  const double first_wrong = of_rank.at(bad.front()->rank);
  const bool is_one_wrong = std::ranges::all_of(of_rank, [&](const auto& entry) {
    return is_near(entry.second, first_wrong, noise) || is_near(entry.second, 1, kNear);
  });
  if (is_one_wrong) return {};  // on all ranks, or on some
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    const auto factors = axis.degree > 1 ? by_coordinate(e, of_rank, axis.axis) : std::nullopt;
    if (!factors.has_value()) continue;
    std::vector<double> values;
    for (const auto& [coordinate, factor] : *factors) values.push_back(factor);
    return factors_along(e, axis.axis, values);
  }
  std::vector<double> factors;
  for (const auto& [rank, factor] : of_rank) factors.push_back(factor);
  return make_cause(CauseId::kFactorPerRank, {{"factors", factors}});
}

Cause cause_backward_parts(const Evidence& e) {
  const int ranks = e.actual.mesh.degree(Axis::kDp);
  if (role_of(e.wanted.key) != NameRole::kLossBackward || ranks == 1 ||
      e.actual.mesh.degree(Axis::kCp) != 1)
    return {};
  const std::vector<double> right = backward_parts(e, ranks), held = held_parts(e, ranks);
  if (right.empty() || held.empty()) return {};
  std::vector<double> factors;
  factors.reserve(right.size());
  for (std::size_t i = 0; i < right.size(); ++i) {
    if (right[i] == 0) return {};
    factors.push_back(held[i] / right[i]);
  }
  // one factor that all ranks share is a scale
  if (std::ranges::all_of(factors, [&](double f) { return is_near(f, factors[0], kNear); }))
    return {};
  Cause cause = factors_along(e, Axis::kDp, factors);
  // any number is some factor of another: only one that the run explains says something
  return cause.id == CauseId::kFactorPerRank ? Cause() : cause;
}

Cause cause_summands(const Evidence& e) {
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || !e.whole.defined() || e.whole.dim() < 2) return {};
  const std::vector<Summand> all = summands_before(e);
  const std::vector<const Summand*> summands = decomposition(e, all);
  if (summands.empty()) return {};
  std::vector<double> common;
  for (const View* view : bad) {
    const auto weights = weights_on(e, *view, summands);
    if (!weights.has_value()) return {};
    if (common.empty()) common = *weights;
    for (std::size_t i = 0; i < common.size(); ++i) {
      if (std::fabs((*weights)[i] - common[i]) > 0.01) return {};
    }
  }
  std::vector<std::string> names, products;
  for (std::size_t i = 0; i < common.size(); ++i) {
    if (std::fabs(common[i]) < kNear) common[i] = 0;
    names.push_back(summands[i]->name);
    products.push_back(
        phrase(PhraseId::kTimesSummand, {{"factor", common[i]}, {"summand", names.back()}}));
  }
  return make_cause(CauseId::kSummandFactors,
                    {{"factors", common},
                     {"summands", names},
                     NamedValue::words("products", fmt::format("{}", fmt::join(products, " + "))),
                     e.on_bad_ranks()});
}

}  // namespace isoshard::detail
