// SPDX-License-Identifier: Apache-2.0
/// Patterns that need nothing but the tensor itself on all ranks: one factor, one offset, one
/// rank's share of a sum. Everything is compared in fp64 on the kept bytes of the ranks concerned.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/causes/run_causes.h"
#include "harness/ids/phrase.h"

namespace isoshard::detail {
namespace {

bool holds_the_same(const Record& a, const Record& b) {
  if (is_flat(a.layout) || is_flat(b.layout)) return a.layout.flat == b.layout.flat;
  return a.parts[0].box.global_offset == b.parts[0].box.global_offset &&
         a.parts[0].box.size == b.parts[0].box.size;
}

/// The copies along an axis that hold the first one's place, if they are not all equal.
std::vector<const View*> copies_along(const Evidence& e, const View& first, Axis axis) {
  std::vector<const View*> copies;
  bool differ = false;
  for (const int rank : e.actual.mesh.group_of(first.rank, axis)) {
    const Held* held = e.held_by(rank);
    if (held == nullptr || held->record->parts.size() != 1) return {};
    if (!holds_the_same(*held->record, *e.held_by(first.rank)->record)) continue;
    const View* view = e.view_of(rank);
    if (view == nullptr) return {};
    differ = differ || !equal(view->actual, first.actual);
    copies.push_back(view);
  }
  return differ ? copies : std::vector<const View*>{};
}

/// "tp", or "the tp ranks that share a part" if only some ranks of the group hold the same place.
std::string holders_in_words(const Evidence& e, Axis axis, std::size_t copies) {
  const std::string name(name_of(axis));
  return static_cast<int>(copies) == e.actual.mesh.degree(axis)
             ? name
             : phrase(PhraseId::kRanksThatShareAPart, {{"axis", name}});
}

/// Whether each copy is right or a multiple of what is right, as ranks hold it that scale the same
/// sum in different ways. Such copies span one dimension: they are no summands of ranks.
bool are_multiples(const Evidence& e, const std::vector<const View*>& copies) {
  return std::ranges::all_of(copies,
                             [&](const View* copy) { return e.factor_on(*copy).has_value(); });
}

/// The combination of copies, all with clearly positive weights, that is nearest to the
/// reference.
Values best_combination(const std::vector<const View*>& copies) {
  const auto n = static_cast<std::int64_t>(copies.size());
  const Values& target = copies.front()->expected;
  std::vector<Values> rows;
  for (const View* copy : copies) rows.push_back(copy->actual);
  const Values matrix = stacked(rows);
  if (target.numel() >= 4 * n) {
    const std::vector<double> weights = best_weights(matrix, target);
    const double least = 0.02 / static_cast<double>(n);
    if (std::ranges::all_of(weights, [least](double weight) { return weight > least; }))
      return weighted_sum(matrix, weights).reshape(target.shape());
  }
  return matrix.mean(0).reshape(target.shape());
}

std::optional<double> explained_factor(const Evidence& e, const Stats& s) {
  if (s.sum_sq_reference == 0 || s.sum_sq_actual == 0 || s.numel < 2) return std::nullopt;
  // sums of squares in fp64 do not tell smaller differences from a factor
  constexpr double kLeast = 0x1p-48;
  if (s.sum_sq_diff < kLeast * s.sum_sq_reference) return std::nullopt;
  const double factor = s.scale();
  const double residual = std::sqrt(std::max(0.0, s.sum_sq_actual - s.dot * factor));
  const double actual_norm = std::sqrt(s.sum_sq_actual);
  if (residual > e.tolerance() * actual_norm || residual > 0.25 * std::sqrt(s.sum_sq_diff))
    return std::nullopt;
  return factor;
}

/// Whether a factor leaves at most a quarter of the error on each wrong rank, or what the tolerance
/// allows.
bool is_on_all_wrong_ranks(const Evidence& e, double factor) {
  return std::ranges::all_of(e.bad_ranks(), [&](int rank) {
    const Held* held = e.held_by(rank);
    if (held == nullptr || held->record->parts.empty()) return true;
    const Stats own = stats_of(*held->record);
    const double rest = std::sqrt(std::max(
        0.0, own.sum_sq_actual - 2 * factor * own.dot + factor * factor * own.sum_sq_reference));
    return rest <= std::max(0.25 * std::sqrt(own.sum_sq_diff),
                            e.tolerance() * std::sqrt(own.sum_sq_actual));
  });
}

/// Whether a factor is fitted, and none of the run's numbers.
bool is_bare(const Cause& cause) {
  return cause.id == CauseId::kScale || cause.id == CauseId::kScaleNearOne;
}

/// Whether so few numbers agree on a factor that noise may, too: each but the first, which the
/// factor is fitted to, tells as many bits as its error has above the tolerance.
bool fits_by_chance(const Evidence& e, const Stats& s, double factor) {
  constexpr double kLeastBits = 10;
  const double noise = std::max(e.result.comparison.allowed_relative_error, 0x1p-23);
  const double bits = std::log2(std::max(std::fabs(factor - 1) / noise, 1.0));
  return static_cast<double>(s.numel - 1) * bits < kLeastBits;
}

/// So few numbers that a factor and an offset fit them alike.
bool are_few(const Evidence& e) {
  constexpr std::int64_t kFew = 8;
  return e.wanted.key.kind == RecordKind::kScalar && numel_of(e.wanted.layout.global_shape) < kFew;
}

/// Where the factor of a gradient of queries or keys is a root of a degree or of the head size, by
/// which scores may be scaled: a hint, and that number.
NamedValues factor_of_scores(const Evidence& e, double factor) {
  const std::string& name = e.wanted.key.name;
  if (e.wanted.key.kind != RecordKind::kActivationGrad ||
      (!name.ends_with(".q_rope") && !name.ends_with(".k_rope")) ||
      e.wanted.layout.global_shape.size() != 4)
    return {};
  const double near = std::clamp(e.tolerance(), 1e-3, 0.01);
  std::vector<std::pair<std::int64_t, std::string_view>> numbers = {
      {e.wanted.layout.global_shape[3], "head size"}};
  // heads are shared out over tp: of axes of one degree it is the likely one
  const int tp = e.actual.mesh.degree(Axis::kTp);
  if (tp > 1) numbers.emplace_back(tp, name_of(Axis::kTp));
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    if (axis.degree > 1 && axis.degree != tp) numbers.emplace_back(axis.degree, name_of(axis.axis));
  }
  for (const auto& [number, words] : numbers) {
    const double root = std::sqrt(static_cast<double>(number));
    const bool is_root = is_near(factor, root, near);
    if (!is_root && !is_near(factor, 1 / root, near)) continue;
    NamedValues values = {{"inverse", is_root ? "" : "1/"}, {"number", words}};
    values.push_back(NamedValue::words("hint", phrase(PhraseId::kRootOfScores, values)));
    return values;
  }
  return {};
}

/// Where the factor is the share of elements that the nearest mask before keeps, or one over it:
/// dropout that does not divide what is kept, or divides it twice. A hint, the mask and its share.
NamedValues factor_of_dropout(const Evidence& e, double factor) {
  constexpr double kDeviations = 4;
  if (e.wanted.key.kind != RecordKind::kActivation || factor <= 0) return {};
  const Record* mask = nullptr;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    if (record.key == e.wanted.key) break;
    if (record.key.kind == RecordKind::kMask && record.key.step == e.wanted.key.step &&
        record.key.call == e.wanted.key.call)
      mask = &record;
  }
  if (mask == nullptr) return {};
  const double kept = e.reference_value(mask->key).mean(), seen = std::min(factor, 1 / factor);
  const double deviation =
      std::sqrt(kept * (1 - kept) / static_cast<double>(numel_of(mask->layout.global_shape)));
  // Of a small mask any factor is the share.
  constexpr double kMostUncertain = 0.02;
  if (kept == 1 || kDeviations * deviation > kMostUncertain ||
      std::fabs(seen - kept) > kDeviations * deviation)
    return {};
  NamedValues values = {{"kept", kept}, {"mask", mask->key.name}};
  const PhraseId hint =
      factor < 1 ? PhraseId::kShareThatDropoutKeeps : PhraseId::kShareThatDropoutKeepsTwice;
  values.push_back(NamedValue::words("hint", phrase(hint, values)));
  return values;
}

}  // namespace

Cause cause_rank_local(const Evidence& e) {
  constexpr double kMuchNearer = 0.25, kOfOneNumber = 0x1p-10;  // of the error
  const View* bad = e.first_bad_view();
  if (bad == nullptr) return {};
  const bool is_number = bad->actual.numel() == 1;
  const auto explains = [&](const Values& candidate, double error) {
    return e.explains(candidate, bad->expected, error) &&
           (!is_number || distance(candidate, bad->expected) <= kOfOneNumber * error);
  };
  double error = distance(bad->actual, bad->expected);
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    const std::vector<const View*> copies =
        axis.degree > 1 ? copies_along(e, *bad, axis.axis) : std::vector<const View*>{};
    if (copies.empty() || are_multiples(e, copies)) continue;
    const auto holders =
        NamedValue::words("holders", holders_in_words(e, axis.axis, copies.size()));
    Values sum = Values::zeros(bad->expected.shape());
    bool is_one_right = false;
    for (const View* copy : copies) {
      sum = sum + copy->actual;
      const double own = distance(copy->actual, bad->expected);
      is_one_right = is_one_right ||
                     (own <= e.tolerance() * norm_of(bad->expected) && own <= kMuchNearer * error);
    }
    // a copy that is right is no share: the others lack everything
    if (is_one_right) continue;
    if (explains(sum, error)) {
      return make_cause(CauseId::kRankLocalPartial,
                        {{"axis", name_of(axis.axis)}, holders, {"copies", copies.size()}});
    }
    for (const View* copy : copies) error = std::max(error, distance(copy->actual, copy->expected));
    if (explains(best_combination(copies), error)) {
      return make_cause(CauseId::kRankLocal,
                        {{"axis", name_of(axis.axis)}, holders, {"copies", copies.size()}});
    }
  }
  return {};
}

Cause cause_mean_of_shards(const Evidence& e) {
  const View* bad = e.first_bad_view();
  if (bad == nullptr) return {};
  const double error = distance(bad->actual, bad->expected);
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    Values sum = Values::zeros(bad->expected.shape());
    bool fits = axis.degree > 1;
    for (const int rank : e.actual.mesh.group_of(bad->rank, axis.axis)) {
      const View* view = e.view_of(rank);
      fits = fits && view != nullptr && view->box.size == bad->box.size;
      fits = fits && (rank == bad->rank || view->box.global_offset != bad->box.global_offset);
      if (!fits) break;
      sum = sum + view->expected;
    }
    if (fits && e.explains(sum / axis.degree, bad->actual, error)) {
      return make_cause(CauseId::kMeanOfShards, {{"shards", axis.degree},
                                                 {"axis", name_of(axis.axis)},
                                                 {"best_fit", e.result.comparison.stats.scale()}});
    }
  }
  return {};
}

Cause cause_scale(const Evidence& e) {
  const Stats& s = e.result.comparison.stats;
  const std::vector<int>& ranks = e.bad_ranks();
  if (const auto factor = explained_factor(e, s)) {
    if (!is_on_all_wrong_ranks(e, *factor)) return {};
    NamedValues more;
    if (ranks.size() < e.held.size())
      more.push_back(
          NamedValue::words("on_ranks", phrase(PhraseId::kOnTheRanks, {{"ranks", ranks}})));
    Cause cause = e.scale_cause(*factor, more);
    // where no number of the run explains the factor, others may
    if (!is_bare(cause)) return cause;
    if (are_few(e)) return {};
    for (const auto hint_of : {factor_of_dropout, factor_of_scores}) {
      const NamedValues hint = hint_of(e, *factor);
      if (hint.empty()) continue;
      more.insert(more.end(), hint.begin(), hint.end());
      return e.scale_cause(*factor, std::move(more));
    }
    return fits_by_chance(e, s, *factor) ? Cause() : cause;
  }
  // the other ranks' parts may be right
  const Held* first = e.held_by(ranks.front());
  if (first == nullptr || e.actual.mesh.world_size() == 1 || first->record->parts.empty())
    return {};
  const Stats own = stats_of(*first->record);
  const auto factor = explained_factor(e, own);
  if (!factor || !is_on_all_wrong_ranks(e, *factor)) return {};
  Cause cause = e.scale_cause(
      *factor, {NamedValue::words("on_ranks", phrase(PhraseId::kOnTheRanks, {{"ranks", ranks}}))});
  const bool fits_others = are_few(e) || fits_by_chance(e, own, *factor);
  return is_bare(cause) && fits_others ? Cause() : cause;
}

Cause cause_offset(const Evidence& e) {
  const View* bad = e.first_bad_view();
  if (bad == nullptr || bad->actual.numel() < 4) return {};
  const Values difference = bad->actual - bad->expected;
  const double error = norm_of(difference), mean = difference.mean();
  if (norm_of(difference - mean) <= 0.05 * error)
    return make_cause(CauseId::kConstantOffset, {{"offset", mean}, {"rank", bad->rank}});
  if (difference.dim() < 2) return {};
  const Values rows = difference.rows();
  if (rows.size(0) < 4 || distance(rows, rows.mean(0)) > 0.05 * error) return {};
  if (Cause cause = multiple_of_parameter(e, rows.mean(0)); !cause.empty()) return cause;
  return make_cause(CauseId::kSameRowAdded, {{"rank", bad->rank}});
}

Cause cause_zeros(const Evidence& e) {
  constexpr std::int64_t kLeastRight = 8;
  // what came from another stage is told with both stages
  if (!cause_in_handover(e).empty()) return {};
  const double near = 4 * e.noise();
  std::int64_t zeros = 0, right = 0;
  std::set<std::int64_t> rows;
  std::set<std::pair<Shape, Shape>> boxes;
  for (const View* view : e.bad_views()) {
    const bool is_copy = !boxes.emplace(view->box.global_offset, view->box.size).second;
    const Values own = view->actual.contiguous(), wanted = view->expected.contiguous();
    const std::int64_t numel = own.numel();
    const double typical = norm_of(wanted) / std::sqrt(static_cast<double>(numel));
    for (std::int64_t i = 0; i < numel; ++i) {
      const double seen = own.flat()[static_cast<std::size_t>(i)],
                   value = wanted.flat()[static_cast<std::size_t>(i)];
      const bool is_right = std::fabs(seen - value) <= near * std::max(std::fabs(value), typical);
      if (!is_right && seen != 0) return {};
      if (is_right && value != 0) ++right;
      if (is_right || is_copy) continue;
      ++zeros;
      rows.insert(view->box.global_offset[0] + i / std::max<std::int64_t>(numel / own.size(0), 1));
    }
  }
  if (zeros == 0 || right < kLeastRight) return {};
  return make_cause(CauseId::kZeros, {{"zeros", zeros},
                                      {"rows", rows},
                                      NamedValue::words("first_rows", some_of(rows)),
                                      e.on_bad_ranks()});
}

bool is_any_copy_wrong(const Evidence& e) {
  constexpr double kMuchNearer = 0.5;  // of the error of the copy that is farthest off
  if (e.result.findings.front().id != FindingId::kCopiesDiffer) return false;
  struct Copies {
    std::map<std::uint64_t, int> votes;
    double least = std::numeric_limits<double>::infinity(), most = 0;
  };
  std::map<Shape, Copies> places;
  for (const Held& held : e.held) {
    for (const PartStats& part : held.record->parts) {
      Copies& copies = places[place_of(part, is_flat(held.record->layout))];
      ++copies.votes[part.digest];
      const double error = std::sqrt(part.stats.sum_sq_diff);
      copies.least = std::min(copies.least, error);
      copies.most = std::max(copies.most, error);
    }
  }
  return std::ranges::none_of(places, [](const auto& place) {
    const Copies& copies = place.second;
    const auto usual = std::ranges::max_element(copies.votes, {}, [](auto& v) { return v.second; });
    const bool is_majority = std::ranges::count_if(copies.votes, [&](const auto& vote) {
                               return vote.second == usual->second;
                             }) == 1;
    return copies.votes.size() > 1 && (is_majority || copies.least <= kMuchNearer * copies.most);
  });
}

Cause cause_differing_copies(const Evidence& e) {
  if (e.result.differing_axes.empty()) return {};
  return make_cause(
      is_any_copy_wrong(e) ? CauseId::kEitherCopyWrong : CauseId::kCopiesDifferOverAxes,
      {{"axes", names_of(e.result.differing_axes)}});
}

}  // namespace isoshard::detail
