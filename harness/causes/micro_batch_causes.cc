// SPDX-License-Identifier: Apache-2.0
/// Micro-batches and samples that a gradient or a loss lacks, or counts with wrong weights.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "harness/causes/run_causes.h"
#include "harness/causes/view/gradient_parts.h"
#include "harness/ids/phrase.h"

namespace isoshard::detail {
namespace {

constexpr double kNearWeight = 0.02;

bool near_weight(double weight, double value) {
  return std::fabs(weight - value) <= kNearWeight * std::max(1.0, std::fabs(value));
}

/// Samples of a step by the ranks that share them out: for each share its samples in the order in
/// which its ranks have them, micro-batch after micro-batch, as places in all micro-batches.
using Shares = std::vector<std::vector<std::size_t>>;

/// Where ranks have the samples of an activation or its gradient; empty unless all shares are as
/// large, and each sample is in one of them.
Shares shares_of(const Evidence& e, RecordKind kind, const std::string& name, int micro_batches) {
  std::map<std::vector<std::size_t>, int> by_samples;
  std::size_t all = 0;
  for (const RankTrace& rank : e.actual.ranks) {
    std::vector<std::size_t> own;
    std::size_t first = 0;
    for (int m = 0; m < micro_batches; ++m) {
      const Record* const record = rank.find({e.wanted.key.step, kind, name, m});
      if (record == nullptr || is_flat(record->layout) || record->layout.global_shape.empty())
        return {};
      std::set<std::pair<std::int64_t, std::int64_t>> runs;
      for (const PartStats& part : record->parts)
        runs.emplace(part.box.global_offset[0], part.box.size[0]);
      for (const auto& [begin, count] : runs) {
        for (std::int64_t i = begin; i < begin + count; ++i)
          own.push_back(first + static_cast<std::size_t>(i));
      }
      first += static_cast<std::size_t>(record->layout.global_shape[0]);
    }
    all = first;
    by_samples.emplace(std::move(own), rank.rank);
  }
  std::map<int, std::vector<std::size_t>> by_rank;
  std::set<std::size_t> seen;
  std::size_t count = 0;
  for (const auto& [samples, rank] : by_samples) {
    by_rank.emplace(rank, samples);
    seen.insert(samples.begin(), samples.end());
    count += samples.size();
  }
  if (by_rank.empty() || count != all || seen.size() != all) return {};
  Shares shares;
  for (auto& [rank, samples] : by_rank) {
    if (samples.size() * by_rank.size() != all) return {};
    shares.push_back(std::move(samples));
  }
  return shares;
}

/// A NaN is any weight: nothing is known of it.
bool fits_weight(double weight, double value, double near) {
  return std::isnan(weight) || std::fabs(weight - value) <= near * std::max(1.0, std::fabs(value));
}

/// One weight for each of `parts` equal runs of the samples of a share; empty if samples of one run
/// have several.
std::vector<double> weights_of_parts(const std::vector<double>& weights, std::size_t parts,
                                     double near) {
  std::vector<double> of_parts;
  const std::size_t each = weights.size() / parts;
  for (std::size_t part = 0; part < parts; ++part) {
    double common = std::nan("");
    for (std::size_t i = part * each; i < (part + 1) * each; ++i) {
      if (std::isnan(common)) common = weights[i];
      if (!fits_weight(weights[i], common, near)) return {};
    }
    of_parts.push_back(common);
  }
  return of_parts;
}

/// The weights of each share, in its order.
std::vector<std::vector<double>> by_shares(const Shares& shares,
                                           const std::vector<double>& numbers) {
  std::vector<std::vector<double>> sorted;
  for (const std::vector<std::size_t>& samples : shares) {
    sorted.emplace_back();
    for (const std::size_t sample : samples) sorted.back().push_back(numbers.at(sample));
  }
  return sorted;
}

/// What the weights of samples say of micro-batches, of which each share has the same in its order:
/// the fewest equal runs of samples with one weight each. They must be numbers of the run, or all
/// but one of them right.
Cause cause_of_runs(const Evidence& e, const Shares& shares, const std::vector<double>& weights,
                    double near) {
  const std::vector<std::vector<double>> sorted = by_shares(shares, weights);
  std::vector<double> common = sorted.front();
  for (const std::vector<double>& own : sorted) {
    for (std::size_t i = 0; i < own.size(); ++i) {
      if (std::isnan(common[i])) common[i] = own[i];
      if (!std::isnan(common[i]) && !fits_weight(own[i], common[i], near)) return {};
    }
  }
  for (std::size_t parts = 2; parts <= common.size(); ++parts) {
    if (common.size() % parts != 0) continue;
    std::vector<double> of_parts = weights_of_parts(common, parts, near);
    if (of_parts.empty()) continue;
    // one weight is a scale, and of nothing that is known nothing is said
    if (std::ranges::all_of(of_parts, [&](double w) { return fits_weight(w, of_parts[0], near); }))
      return {};
    if (std::ranges::any_of(of_parts, [](double w) { return std::isnan(w); })) return {};
    std::vector<int> right, missing, others;
    bool are_named = true;
    for (std::size_t i = 0; i < parts; ++i) {
      const double weight = of_parts[i];
      const int part = static_cast<int>(i);
      (fits_weight(weight, 1, near)   ? right
       : fits_weight(weight, 0, near) ? missing
                                      : others)
          .push_back(part);
      if (!others.empty() && others.back() == part)
        are_named = are_named && (is_near(weight, static_cast<double>(parts), near) ||
                                  e.formula_of(weight, near).has_value());
    }
    const int last = static_cast<int>(parts) - 1;
    if (others.empty())
      return make_cause(CauseId::kMicroBatchMissing,
                        {{"present", right}, {"missing", missing}, {"last", last}});
    const bool is_one_wrong = right.size() + 1 == parts;
    if (!is_one_wrong && !are_named) return {};
    for (double& weight : of_parts) weight /= static_cast<double>(parts);
    return make_cause(CauseId::kMicroBatchWeights,
                      {{"weights", of_parts}, {"micro_batches", parts}});
  }
  return {};
}

/// How often samples count in the gradient at a model's output, and how many tokens of each do.
struct CountedSamples {
  std::string module;
  std::vector<double> weights = {}, tokens = {};
};

/// Adds the weights of the samples in one part of a rank's gradient. The result is false if a
/// sample is no multiple of the reference's.
bool add_weights(const Values& actual, const Values& expected, std::size_t first, double near,
                 CountedSamples& counted) {
  const double typical =
      norm_of(expected) /
      std::sqrt(static_cast<double>(std::max<std::int64_t>(1, expected.numel())));
  for (std::int64_t i = 0; i < actual.size(0); ++i) {
    const Values own = actual.narrow(0, i, 1).flattened(),
                 right = expected.narrow(0, i, 1).flattened();
    const double squares = dot(right, right);
    if (squares == 0) {
      if (norm_of(own) != 0) return false;
      continue;
    }
    const double weight = dot(own, right) / squares;
    const double allowed = near * std::max(1.0, std::fabs(weight));
    for (std::size_t k = 0; k < right.flat().size(); ++k) {
      if (!(std::fabs(own.flat()[k] - weight * right.flat()[k]) <=
            allowed * std::max(std::fabs(right.flat()[k]), typical)))
        return false;
    }
    double& known = counted.weights.at(first + static_cast<std::size_t>(i));
    if (!fits_weight(known, weight, near)) return false;
    known = weight;
  }
  return true;
}

/// Counts the samples of the first gradient that backward makes. The result is nothing if what a
/// rank holds of a sample is no multiple of the reference's.
std::optional<CountedSamples> counted_samples(const Evidence& e, double near) {
  const RecordKey* first = nullptr;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    if (first == nullptr && record.key.step == e.wanted.key.step &&
        record.key.kind == RecordKind::kActivationGrad)
      first = &record.key;
  }
  if (first == nullptr) return std::nullopt;
  CountedSamples counted{.module = first->name};
  for (int m = 0; m < e.num_micro_batches(); ++m) {
    RecordKey key = *first;
    key.call = m;
    const Record* const record = e.reference.find(key);
    if (record == nullptr || record->layout.global_shape.size() < 2) return std::nullopt;
    const Values whole = e.reference_value(key) / record->grad_scale;
    const std::size_t begin = counted.weights.size();
    for (std::int64_t i = 0; i < whole.size(0); ++i) {
      const Values rows = whole.narrow(0, i, 1).rows();
      double tokens = 0;
      for (std::int64_t row = 0; row < rows.size(0); ++row)
        tokens += norm_of(rows.narrow(0, row, 1)) == 0 ? 0 : 1;
      counted.tokens.push_back(tokens);
      counted.weights.push_back(std::nan(""));
    }
    for (const RankTrace& rank : e.actual.ranks) {
      const Record* const own = rank.find(key);
      if (own == nullptr || is_flat(own->layout) || is_partial(own->layout)) return std::nullopt;
      const bool is_kept = own->kept && rank.arena != nullptr;
      const Values local = is_kept ? Values(rank.tensor(*own)) / own->grad_scale : Values();
      for (const PartStats& part : own->parts) {
        if (!lies_in(part.box, whole.shape())) return std::nullopt;
        const Values right = whole.cut(part.box.global_offset, part.box.size);
        // what was not kept is right
        const Values seen = is_kept ? local.cut(part.box.local_offset, part.box.size) : right;
        if (!add_weights(seen, right, begin + static_cast<std::size_t>(part.box.global_offset[0]),
                         near, counted))
          return std::nullopt;
      }
    }
  }
  return counted;
}

/// Each share divides each of its micro-batches by the number of its own tokens.
Cause cause_of_means(const Shares& shares, const CountedSamples& counted, double near) {
  const auto weights = by_shares(shares, counted.weights),
             tokens = by_shares(shares, counted.tokens);
  const double all = std::accumulate(counted.tokens.begin(), counted.tokens.end(), 0.0);
  const std::size_t length = shares.front().size();
  for (std::size_t parts = 1; parts <= length; ++parts) {
    if (length % parts != 0) continue;
    std::vector<double> counts;
    bool fits = true, is_any_wrong = false;
    for (std::size_t s = 0; fits && s < shares.size(); ++s) {
      const std::vector<double> own = weights_of_parts(weights[s], parts, near);
      fits = own.size() == parts;
      for (std::size_t part = 0; fits && part < parts; ++part) {
        const auto first = tokens[s].begin() + static_cast<std::ptrdiff_t>(part * (length / parts));
        counts.push_back(
            std::accumulate(first, first + static_cast<std::ptrdiff_t>(length / parts), 0.0));
        const double means = static_cast<double>(shares.size() * parts);
        fits = counts.back() > 0 && is_near(own[part], all / (means * counts.back()), near);
        is_any_wrong = is_any_wrong || !fits_weight(own[part], 1, near);
      }
    }
    if (!fits || !is_any_wrong) continue;
    NamedValues values = {{"means", counts.size()}, {"token_counts", counts}};
    values.push_back(
        NamedValue::words("of_tokens", phrase(PhraseId::kOfTokens, {{"token_counts", counts}})));
    return make_cause(CauseId::kMeanOfRankMeans, std::move(values));
  }
  return {};
}

double near_of(const Evidence& e) {
  return e.is_wide() ? 1e-3 : kNearWeight;
}

/// Samples that enter a gradient with other weights than 1, the same on all ranks.
Cause cause_of_samples(const Evidence& e) {
  std::vector<double> common;
  std::string module;
  int micro_batches = 0;
  const double near = near_of(e);
  const std::vector<const View*> bad = e.bad_views();
  for (const View* const view : bad) {
    const std::optional<Summands> summands = summands_of_samples(e, *view);
    if (!summands.has_value()) return {};
    const std::vector<double> weights = weights_in(e, *view, *summands, summands->pieces);
    if (weights.empty()) return {};
    if (common.empty()) common = weights;
    for (std::size_t i = 0; i < common.size(); ++i) {
      if (!fits_weight(weights[i], common[i], near)) return {};
    }
    module = summands->module;
    micro_batches = summands->micro_batches;
  }
  if (common.empty()) return {};
  const Shares shares = shares_of(e, RecordKind::kActivation, module, micro_batches);
  return shares.empty() ? Cause() : cause_of_runs(e, shares, common, near);
}

Cause cause_of_weights(const Summands& summands, const std::vector<double>& weights, int own_slice,
                       bool has_copies) {
  std::vector<int> right, missing, local;
  std::vector<double> alike;
  for (int m = 0; m < summands.micro_batches; ++m) {
    const auto first = weights.begin() + static_cast<std::ptrdiff_t>(m) * summands.slices;
    const std::vector<double> own(first, first + summands.slices);
    const auto all_near = [&](double value) {
      return std::all_of(own.begin(), own.end(), [&](double w) { return near_weight(w, value); });
    };
    bool is_local = summands.slices > 1;
    for (int s = 0; s < summands.slices; ++s)
      is_local = is_local && (s == own_slice) != near_weight(own[static_cast<std::size_t>(s)], 0);
    if (all_near(1)) right.push_back(m);
    if (all_near(0)) missing.push_back(m);
    if (is_local) local.push_back(m);
    if (all_near(own[0])) alike.push_back(own[0]);
  }
  const int all = summands.micro_batches;
  const auto count = [](const std::vector<int>& items) { return static_cast<int>(items.size()); };
  if (!missing.empty() && !right.empty() && count(right) + count(missing) == all) {
    return make_cause(CauseId::kMicroBatchMissing,
                      {{"present", right}, {"missing", missing}, {"last", all - 1}});
  }
  if (!local.empty() && !right.empty() && count(right) + count(local) == all) {
    return make_cause(
        CauseId::kMicroBatchRankLocal,
        {{"local", local}, {"right", right}, {"last", all - 1}, {"axis", name_of(summands.axis)}});
  }
  if (!has_copies && count(local) == all)
    return make_cause(CauseId::kPiecesRankLocal, {{"axis", name_of(summands.axis)}});
  const bool uniform = std::all_of(alike.begin(), alike.end(),
                                   [&](double w) { return near_weight(w / alike.front(), 1); });
  if (static_cast<int>(alike.size()) == all && !uniform) {
    for (double& weight : alike) weight /= all;
    return make_cause(CauseId::kMicroBatchWeights, {{"weights", alike}, {"micro_batches", all}});
  }
  return {};
}

/// Of a tied weight: which of the modules that use it give nothing to what wrong ranks hold.
Cause missing_uses(const Evidence& e, const Summands& summands) {
  if (summands.uses.empty()) return {};
  std::vector<Values> pieces;
  for (const auto& [module, piece] : summands.uses) pieces.push_back(piece);
  std::set<std::size_t> missing;
  const std::vector<const View*> bad = e.bad_views();
  for (const View* const view : bad) {
    const std::vector<double> weights = weights_in(e, *view, summands, pieces);
    std::set<std::size_t> own;
    for (std::size_t u = 0; u < weights.size(); ++u) {
      if (near_weight(weights[u], 0)) own.insert(u);
      if (!near_weight(weights[u], 0) && !near_weight(weights[u], 1)) return {};
    }
    if (own.empty() || own.size() == weights.size() || (view != bad.front() && own != missing))
      return {};
    missing = std::move(own);
  }
  // rows of the ids alone have a cause of their own (cause_in_rows)
  if (!missing.contains(0)) return {};
  std::vector<std::string> modules[2];
  for (std::size_t u = 0; u < pieces.size(); ++u)
    modules[missing.contains(u) ? 1 : 0].push_back(summands.uses[u].first);
  return make_cause(CauseId::kTiedUseMissing,
                    {{"present", modules[0]}, {"missing", modules[1]}, e.on_bad_ranks()});
}

}  // namespace

Cause cause_in_micro_batches(const Evidence& e) {
  if (e.wanted.key.kind != RecordKind::kGrad || e.wanted.key.name.rfind('.') == std::string::npos)
    return {};
  const View* bad = e.first_bad_view();
  if (bad == nullptr || bad->box.size.empty()) return {};
  const Held* held = e.held_by(bad->rank);
  const bool has_copies = held == nullptr || !is_flat(held->record->layout);
  const auto summands = summands_of_micro_batches(e, *bad, has_copies);
  if (!summands.has_value()) return cause_of_samples(e);
  if (Cause cause = missing_uses(e, *summands); !cause.empty()) return cause;
  const std::vector<double> weights = weights_in(e, *bad, *summands, summands->pieces);
  Cause cause;
  if (!weights.empty())
    cause = cause_of_weights(
        *summands, weights,
        summands->axis == Axis::kWorld ? 0 : e.actual.mesh.coordinate(bad->rank, summands->axis),
        has_copies);
  return cause.empty() ? cause_of_samples(e) : cause;
}

Cause cause_sample_weights(const Evidence& e) {
  if (!is_named_loss(role_of(e.wanted.key))) return {};
  const double near = near_of(e);
  const std::optional<CountedSamples> counted = counted_samples(e, near);
  if (!counted.has_value()) return {};
  const Shares shares =
      shares_of(e, RecordKind::kActivationGrad, counted->module, e.num_micro_batches());
  if (shares.empty()) return {};
  if (Cause cause = cause_of_means(shares, *counted, near); !cause.empty()) return cause;
  return cause_of_runs(e, shares, counted->weights, near);
}

}  // namespace isoshard::detail
