// SPDX-License-Identifier: Apache-2.0
/// Causes of wrong data ids and scalars.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "harness/causes/class_causes.h"
#include "harness/causes/run_causes.h"
#include "harness/ids/phrase.h"

namespace isoshard::detail {
namespace {

/// Of an integer tensor; empty if its parts cannot be put together.
Values assembled(const Trace& trace, const RecordKey& key) {
  try {
    return Values(trace.assemble(key));
  } catch (const Error&) {
    return {};
  }
}

std::map<std::int64_t, std::int64_t> count_ids(const Values& ids) {
  std::map<std::int64_t, std::int64_t> counts;
  const Values own = ids.contiguous();
  for (const double id : own.flat()) ++counts[static_cast<std::int64_t>(id)];
  return counts;
}

std::string fraction(std::int64_t part, std::int64_t whole) {
  const std::int64_t divisor = std::gcd(part, whole);
  return fmt::format("{}/{}", part / divisor, whole / divisor);
}

/// 1 where a label counts, else 0.
Values is_valid(const Values& labels) {
  return labels.map([](double label) { return label >= 0 ? 1 : 0; });
}

/// Of each row of a matrix where its first and last 1 stand; of a row without any the first and
/// last place.
struct Places {
  std::vector<std::int64_t> first, last;
};

Places places_of_ones(const Values& ones) {
  Places places;
  for (std::int64_t row = 0; row < ones.size(0); ++row) {
    const Values own = ones.narrow(0, row, 1).contiguous();
    const std::span<const double> numbers = own.flat();
    const auto first = std::find(numbers.begin(), numbers.end(), 1.0);
    const auto last = std::find(numbers.rbegin(), numbers.rend(), 1.0);
    const auto end = static_cast<std::int64_t>(numbers.size());
    places.first.push_back(first == numbers.end() ? 0 : first - numbers.begin());
    places.last.push_back(end - 1 - (last == numbers.rend() ? 0 : last - numbers.rbegin()));
  }
  return places;
}

Cause fewer_valid_tokens(const Values& expected, const Values& actual) {
  const Values wanted = is_valid(expected), counted = is_valid(actual);
  const auto before = static_cast<std::int64_t>(wanted.sum()),
             after = static_cast<std::int64_t>(counted.sum());
  if (before == after)
    return equal(wanted, counted) ? Cause() : make_cause(CauseId::kValidTokensElsewhere);
  if (after > before)
    return make_cause(CauseId::kMoreValidTokens, {{"num_tokens", after - before}});
  NamedValues values = {{"num_tokens", before - after}};
  const auto made = [&] { return make_cause(CauseId::kFewerValidTokens, values); };
  if (expected.dim() != 2) return made();
  const Values lost = (wanted - counted).map([](double value) { return std::max(value, 0.0); });
  const Values lost_B = lost.sum(1);
  if (lost_B.min() != lost_B.max()) return made();
  const auto each = static_cast<std::int64_t>(lost_B.max());
  values.emplace_back("each", each);
  values.push_back(NamedValue::words(
      "per_sample",
      phrase(each == 1 ? PhraseId::kOnePerSample : PhraseId::kSomePerSample, {{"each", each}})));
  if (each != 1) return made();
  const Places place = places_of_ones(lost), valid = places_of_ones(wanted);
  const bool is_first = place.first == valid.first;
  if (!is_first && place.first != valid.last) return made();
  values.emplace_back("place", is_first ? "first" : "last");
  values.push_back(NamedValue::words(
      "at_place", phrase(PhraseId::kAtValidToken, {{"place", is_first ? "first" : "last"}})));
  return made();
}

}  // namespace

Cause cause_of_repeats(const Evidence& e, const Values& expected, const Values& actual,
                       std::string_view items) {
  const auto wanted = count_ids(expected), seen = count_ids(actual);
  if (wanted == seen) return make_cause(CauseId::kIdsInOtherOrder, {{"items", items}});
  const auto is_alike = [](const auto& counts) {
    return std::all_of(counts.begin(), counts.end(),
                       [&](const auto& entry) { return entry.second == counts.begin()->second; });
  };
  const bool known = std::all_of(seen.begin(), seen.end(),
                                 [&](const auto& entry) { return wanted.contains(entry.first); });
  if (!is_alike(wanted) || !is_alike(seen) || seen.empty() || !known) return {};
  const double times =
      static_cast<double>(seen.begin()->second) / static_cast<double>(wanted.begin()->second);
  if (times <= 1) return {};
  const auto formula = e.formula_of(times, 1e-6);
  const auto all = static_cast<std::int64_t>(wanted.size()),
             missed = all - static_cast<std::int64_t>(seen.size());
  NamedValues values = {{"items", items},
                        {"times", times},
                        {"missed", missed},
                        {"num_ids", all},
                        NamedValue::words("share", fraction(missed, all))};
  if (formula.has_value()) values.emplace_back("formula", *formula);
  values.push_back(NamedValue::words(
      "how_often",
      phrase(formula.has_value() ? PhraseId::kTimesOfFormula : PhraseId::kPlainTimes, values)));
  return make_cause(CauseId::kIdsRepeated, std::move(values));
}

namespace {

Cause mean_of_means(const Evidence& e, double actual) {
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    const bool fits = record.key.step == e.wanted.key.step &&
                      record.key.kind == RecordKind::kScalar &&
                      record.key.name.starts_with(e.wanted.key.name + "_per_");
    const Values parts = fits ? assembled(e.actual, record.key) : Values();
    if (!parts.defined() || parts.numel() < 2) continue;
    const Values means = parts.flattened(), right = e.reference_value(record.key);
    if (!is_near(means.mean(), actual, e.tolerance())) continue;
    // Where the right run's mean of means is its value, too (equally many tokens), it says nothing.
    if (is_near(right.mean(), e.whole.item(), e.tolerance())) continue;
    NamedValues values = {{"means", means.numel()}};
    if (const std::vector<double> counts = counted_targets(e, means.numel()); !counts.empty()) {
      const Values weights({means.numel()}, counts);
      // The counts are believed if they give the reference's value.
      if (is_near(dot(means, weights) / weights.sum(), e.whole.item(), 1e-4)) {
        values.emplace_back("token_counts", counts);
        values.push_back(NamedValue::words(
            "of_tokens", phrase(PhraseId::kOfTokens, {{"token_counts", counts}})));
      }
    }
    return make_cause(CauseId::kMeanOfRankMeans, std::move(values));
  }
  return {};
}

/// Squared gradient norms of the run's own gradients: of parameters of which the coordinates of an
/// axis hold different parts, by coordinate, and of those of which each of them holds the same.
struct Squares {
  double replicated = 0;
  std::vector<double> split;
};

/// Adds one parameter. Along other axes than `axis` ranks hold copies or other parts; what several
/// ranks hold counts once.
void add_squares(const Evidence& e, Axis axis, const RecordKey& key, Squares& squares) {
  std::vector<std::map<Shape, double>> by_coordinate(squares.split.size());
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* record = rank.find(key);
    if (record == nullptr) continue;
    auto& parts =
        by_coordinate.at(static_cast<std::size_t>(e.actual.mesh.coordinate(rank.rank, axis)));
    for (const PartStats& part : record->parts)
      parts.emplace(place_of(part, is_flat(record->layout)), part.stats.sum_sq_actual);
  }
  const auto same_places = [&](const auto& parts) {
    return std::equal(parts.begin(), parts.end(), by_coordinate.front().begin(),
                      by_coordinate.front().end(),
                      [](const auto& a, const auto& b) { return a.first == b.first; });
  };
  const bool is_replicated = std::all_of(by_coordinate.begin(), by_coordinate.end(), same_places);
  std::set<Shape> seen;
  for (std::size_t c = 0; c < by_coordinate.size(); ++c) {
    for (const auto& [place, sum] : by_coordinate[c]) {
      if (seen.insert(place).second) (is_replicated ? squares.replicated : squares.split[c]) += sum;
    }
  }
}

Squares squares_along(const Evidence& e, Axis axis) {
  Squares squares{0, std::vector<double>(static_cast<std::size_t>(e.actual.mesh.degree(axis)), 0)};
  for (const Record& wanted : e.reference.trace().ranks.at(0).records) {
    if (stage_of(wanted.key) == Stage::kParameterGrad && !is_gradient_besides(wanted.key) &&
        wanted.key.step == e.wanted.key.step)
      add_squares(e, axis, wanted.key, squares);
  }
  return squares;
}

Cause norm_of_other_squares(const Evidence& e, double actual) {
  // A norm whose squares are added up in fp64 or fp32; one in 16 bits tells too little. Six sums
  // are tried on each axis: an error of kLeastOff is explained by chance in one of 20 runs at most.
  constexpr double kNear = 2e-6, kLeastOff = 240 * kNear;
  const double expected = e.whole.item();
  if (std::fabs(actual - expected) < kLeastOff * expected) return {};
  const NamedValue direction("direction", actual < expected ? "too small" : "too large");
  const auto is_that = [&](double squares) { return is_near(actual, std::sqrt(squares), kNear); };
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    if (axis.degree == 1) continue;
    const Squares squares = squares_along(e, axis.axis);
    const double split = std::accumulate(squares.split.begin(), squares.split.end(), 0.0);
    if (split == 0) continue;
    if (is_that(split + axis.degree * squares.replicated)) {
      return make_cause(CauseId::kReplicatedCountedOften,
                        {direction, {"degree", axis.degree}, {"axis", name_of(axis.axis)}});
    }
    for (std::size_t r = 0; r < squares.split.size(); ++r) {
      if (is_that(squares.split[r] + squares.replicated)) {
        return make_cause(CauseId::kNormOfOneRank,
                          {direction, {"axis", name_of(axis.axis)}, {"coordinate", r}});
      }
    }
    if (is_that(split)) return make_cause(CauseId::kReplicatedLeftOut, {direction});
  }
  return {};
}

/// A norm that is made of other numbers than the squares of all gradients.
Cause norm_of_another_kind(const Evidence& e, double actual) {
  constexpr double kNear = 1e-4;
  const double expected = e.whole.item();
  double largest = 0;
  for (const Record& wanted : e.reference.trace().ranks.at(0).records) {
    if (stage_of(wanted.key) != Stage::kParameterGrad || is_gradient_besides(wanted.key) ||
        wanted.key.step != e.wanted.key.step)
      continue;
    const HostTensor own = e.reference.tensor(wanted.key);
    for (std::int64_t i = 0; i < own.numel(); ++i)
      largest = std::max(largest,
                         std::fabs(value_at(own.bytes.data(), own.dtype, i) / wanted.grad_scale));
  }
  if (is_near(actual, largest, kNear)) return make_cause(CauseId::kLargestElement);
  if (is_near(actual, expected * expected, kNear) && !is_near(expected, 1, 0.01))
    return make_cause(CauseId::kNormSquared);
  double of_ranks = 0;
  for (const RankTrace& rank : e.actual.ranks) {
    double squares = 0;
    for (const Record& record : rank.records) {
      if (stage_of(record.key) != Stage::kParameterGrad || is_gradient_besides(record.key) ||
          record.key.step != e.wanted.key.step)
        continue;
      for (const PartStats& part : record.parts) squares += part.stats.sum_sq_actual;
    }
    of_ranks += std::sqrt(squares);
  }
  if (is_near(actual, of_ranks, kNear))
    return make_cause(CauseId::kNormsAdded, {{"world_size", e.actual.ranks.size()}});
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    if (axis.degree == 1) continue;
    const Squares squares = squares_along(e, axis.axis);
    double sum = 0;
    for (const double split : squares.split) sum += std::sqrt(split + squares.replicated);
    if (is_near(actual, sum, kNear))
      return make_cause(CauseId::kNormsOfAxisAdded,
                        {{"degree", axis.degree}, {"axis", name_of(axis.axis)}});
  }
  return {};
}

/// Copies that differ along an axis and whose squares add up to the reference's, or to those of the
/// run's own gradients, which in 16 bits are not so near the reference's.
Cause squares_add_up(const Evidence& e, const View& bad) {
  constexpr double kNear = 1e-4;
  const double expected = e.whole.item();
  for (const Axis axis : e.result.differing_axes) {
    double sum = 0;
    for (const int rank : e.actual.mesh.group_of(bad.rank, axis)) {
      const View* view = e.view_of(rank);
      if (view == nullptr) return {};
      sum += view->actual.item() * view->actual.item();
    }
    const Squares squares = squares_along(e, axis);
    const double own =
        std::sqrt(std::accumulate(squares.split.begin(), squares.split.end(), squares.replicated));
    const bool is_own = own > 0 && is_near(std::sqrt(sum), own, kNear) &&
                        is_near(own, expected, std::clamp(e.tolerance(), kNear, 0.02));
    if (is_own || is_near(std::sqrt(sum), expected, kNear)) {
      return make_cause(CauseId::kSquaresNotSummed, {{"axis", name_of(axis)}});
    }
  }
  return {};
}

/// What `columns` more logits of 0 would add to the reference's mean loss of each of `n` equal runs
/// of samples: the mean over counted targets of log(1 + columns / sum of exp). Empty if logits and
/// labels do not fit.
std::vector<double> offsets_of_padding(const Evidence& e, const std::string& head,
                                       std::int64_t columns, std::int64_t n) {
  std::vector<double> sums(static_cast<std::size_t>(n), 0), counts = sums;
  for (int m = 0; m < e.num_micro_batches(); ++m) {
    const RecordKey logits_key{e.wanted.key.step, RecordKind::kActivation, head, m};
    const RecordKey labels_key{e.wanted.key.step, RecordKind::kDataId, "labels", m};
    const Record* const labels_record = e.reference.find(labels_key);
    if (e.reference.find(logits_key) == nullptr || labels_record == nullptr ||
        is_floating(labels_record->dtype))
      return {};
    const Values logits = e.reference_value(logits_key), labels = e.reference_value(labels_key);
    if (logits.dim() != 3 || labels.dim() != 2 || labels.size(0) != logits.size(0) ||
        labels.size(1) != logits.size(1))
      return {};
    if (labels.size(0) % n != 0 || labels.size(1) < 2) return {};
    const std::int64_t targets = labels.size(1) - 1;
    const Values counted = is_valid(labels.narrow(1, 1, targets));
    const Values more = log_sum_exp(logits.narrow(1, 0, targets)).map([columns](double lse) {
      return std::log1p(static_cast<double>(columns) * std::exp(-lse));
    });
    const Values added = (more * counted).reshape({n, -1}).sum(1),
                 tokens = counted.reshape({n, -1}).sum(1);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] += added.flat()[i];
      counts[i] += tokens.flat()[i];
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] /= std::max(counts[i], 1.0);
  return sums;
}

/// A loss that is too large by what the padding of a head's outputs adds, if its logits are 0.
Cause softmax_over_padding(const Evidence& e, const View& bad) {
  for (const Record& record : e.actual.ranks.front().records) {
    const Layout& layout = record.layout;
    if (record.key.kind != RecordKind::kActivation || record.key.step != e.wanted.key.step ||
        record.key.call != 0)
      continue;
    if (!layout.explicit_parts || record.local_shape.empty()) continue;
    const std::int64_t padded = record.local_shape.back() * e.actual.mesh.degree(Axis::kTp),
                       whole = layout.global_shape.back();
    if (padded <= whole) continue;
    const std::vector<double> offsets =
        offsets_of_padding(e, record.key.name, padded - whole, e.whole.numel());
    if (offsets.empty()) continue;
    const std::int64_t first = bad.box.global_offset.empty() ? 0 : bad.box.global_offset[0];
    const Values seen = (bad.actual - bad.expected).flattened();
    bool fits = true;
    for (std::size_t i = 0; i < seen.flat().size(); ++i)
      fits = fits && is_near(seen.flat()[i], offsets[static_cast<std::size_t>(first) + i], 0.01);
    if (!fits) continue;
    return make_cause(CauseId::kPaddingInSoftmax, {{"offset", seen.flat()[0]},
                                                   {"columns", padded - whole},
                                                   {"head", record.key.name},
                                                   {"padded", padded},
                                                   {"width", whole}});
  }
  return {};
}

/// A mean of logarithms that is too large by the logarithm of a degree, or of how much wider a
/// padded dim is than the true one.
Cause logarithmic_offset(const Evidence& e, double offset) {
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    if (axis.degree > 1 && is_near(offset, std::log(static_cast<double>(axis.degree)), 1e-3)) {
      return make_cause(CauseId::kOffsetOfDegree,
                        {{"offset", offset}, {"axis", name_of(axis.axis)}});
    }
  }
  for (const Record& record : e.actual.ranks.front().records) {
    const Layout& layout = record.layout;
    if (record.key.kind != RecordKind::kActivation || !layout.explicit_parts ||
        record.local_shape.empty())
      continue;
    const std::int64_t padded = record.local_shape.back() * e.actual.mesh.degree(Axis::kTp),
                       whole = layout.global_shape.back();
    if (padded > whole &&
        is_near(offset, std::log(static_cast<double>(padded) / static_cast<double>(whole)), 0.02)) {
      return make_cause(
          CauseId::kOffsetOfWidths,
          {{"offset", offset}, {"padded", padded}, {"width", whole}, {"head", record.key.name}});
    }
  }
  return {};
}

/// A loss that is a multiple of the right one, because it is divided by another count of tokens.
Cause other_token_count(const Evidence& e, double factor) {
  constexpr double kNear = 1e-3;
  const std::vector<double> counts = counted_targets(e, 1);
  if (counts.empty() || !is_named_loss(role_of(e.wanted.key)) || !(factor > 0)) return {};
  const double right = counts[0], used = std::round(right / factor);
  // a count that roundings do not tell from its neighbors says nothing
  if (e.tolerance() * right > kNear || std::fabs(right / factor - used) > kNear) return {};
  if (used == right || std::fabs(used - right) > right / 4) return {};
  NamedValues values = {{"used", used}, {"right", right}};
  std::string_view rounded_to;
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    if (axis.degree > 1 && used == axis.degree * std::floor(right / axis.degree))
      rounded_to = name_of(axis.axis);
  }
  if (!rounded_to.empty()) {
    values.emplace_back("axis", rounded_to);
    values.push_back(
        NamedValue::words("rounded", phrase(PhraseId::kRoundedDown, {{"axis", rounded_to}})));
  }
  return make_cause(CauseId::kDividedByOtherCount, std::move(values));
}

/// A learning rate that another step near by has, and the steps between have not.
Cause rate_of_another_step(const Evidence& e, double actual) {
  constexpr double kNear = 1e-9;  // of numbers that one rule makes
  for (const int away : {-1, 1, -2, 2}) {
    const RecordKey key{e.wanted.key.step + away, RecordKind::kScalar, e.wanted.key.name, 0};
    if (e.reference.find(key) == nullptr) continue;
    const double other = e.reference_value(key).item();
    if (other == e.whole.item() || std::fabs(actual - other) > kNear * std::fabs(other)) continue;
    NamedValues values = {{"step", key.step}, e.on_bad_ranks()};
    // where a warm-up makes one rate a multiple of another, the mesh may be the reason as well
    const double scale = actual / e.whole.item();
    const bool is_degree = std::ranges::any_of(e.actual.mesh.axes(), [&](const AxisDegree& axis) {
      return axis.degree > 1 && std::fabs(scale - axis.degree) <= kNear * scale;
    });
    if (is_degree) {
      values.emplace_back("scale", scale);
      values.push_back(NamedValue::words("or_times", phrase(PhraseId::kOrTimes, values)));
    }
    return make_cause(CauseId::kRateOfOtherStep, std::move(values));
  }
  return {};
}

/// Of a number that ranks hold summands of: the sum is a multiple of the right one.
Cause factor_of_summands(const Evidence& e) {
  const Stats& stats = e.result.comparison.stats;
  if (e.wanted.key.kind != RecordKind::kScalar || !e.views.empty() || stats.numel != 1 ||
      stats.sum_sq_reference == 0)
    return {};
  const auto formula = e.formula_of(stats.scale(), 1e-3);
  if (!formula.has_value()) return other_token_count(e, stats.scale());
  return make_cause(CauseId::kScaleOfFormula, {{"scale", stats.scale()}, {"formula", *formula}});
}

}  // namespace

std::vector<double> counted_targets(const Evidence& e, std::int64_t n) {
  std::vector<double> counts(static_cast<std::size_t>(n), 0);
  bool any = false;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    if (record.key.step != e.wanted.key.step || record.key.kind != RecordKind::kDataId ||
        record.key.name != "labels" || is_floating(record.dtype))
      continue;
    const Values labels = e.reference_value(record.key);
    if (labels.dim() != 2 || labels.size(0) % n != 0 || labels.size(1) < 2) return {};
    // the first token is nobody's target
    const Values targets = is_valid(labels.narrow(1, 1, labels.size(1) - 1));
    const Values per_run = targets.reshape({n, -1}).sum(1);
    for (std::size_t i = 0; i < counts.size(); ++i) counts[i] += per_run.flat()[i];
    any = true;
  }
  return any ? counts : std::vector<double>{};
}

Cause cause_in_data(const Evidence& e) {
  // what is no integer is no id, and no label
  if (e.wanted.key.kind != RecordKind::kDataId || !e.whole.defined() ||
      is_floating(e.wanted.dtype) || floats_in_bits(e.whole, e.wanted.dtype).defined())
    return {};
  const Values actual = assembled(e.actual, e.wanted.key);
  if (!actual.defined() || actual.shape() != e.whole.shape()) return {};
  const bool has_masked = e.whole.min() < 0 || actual.min() < 0;
  if (has_masked) return fewer_valid_tokens(e.whole, actual);
  return cause_of_repeats(e, e.whole, actual, "ids");
}

Cause cause_in_scalars(const Evidence& e) {
  const View* bad =
      e.wanted.key.kind == RecordKind::kScalar && !e.views.empty() ? e.first_bad_view() : nullptr;
  if (bad == nullptr) return factor_of_summands(e);
  if (e.whole.numel() != 1) {
    Cause offset = logarithmic_offset(e, (bad->actual - bad->expected).mean());
    return offset.empty() ? softmax_over_padding(e, *bad) : offset;
  }
  const double actual = bad->actual.item(), expected = e.whole.item();
  if (Cause cause = mean_of_means(e, actual); !cause.empty()) return cause;
  if (e.result.comparison.stage == Stage::kGradNorm) {
    if (Cause cause = squares_add_up(e, *bad); !cause.empty()) return cause;
    if (Cause cause = norm_of_other_squares(e, actual); !cause.empty()) return cause;
    if (Cause cause = cause_norm_squares(e); !cause.empty()) return cause;
    if (Cause cause = norm_of_another_kind(e, actual); !cause.empty()) return cause;
  }
  if (const auto formula = expected != 0 ? e.formula_of(actual / expected, 1e-3) : std::nullopt)
    return make_cause(CauseId::kScaleOfFormula,
                      {{"scale", actual / expected}, {"formula", *formula}});
  if (role_of(e.wanted.key) == NameRole::kLearningRate) {
    if (Cause cause = rate_of_another_step(e, actual); !cause.empty()) return cause;
    if (expected != 0) return e.scale_cause(actual / expected);
  }
  if (Cause cause = expected == 0 ? Cause() : other_token_count(e, actual / expected);
      !cause.empty())
    return cause;
  Cause offset = logarithmic_offset(e, actual - expected);
  return offset.empty() ? softmax_over_padding(e, *bad) : offset;
}

Cause cause_number_off(const Evidence& e) {
  constexpr double kAlike = 1e-3;  // of the offset
  if (e.wanted.key.kind != RecordKind::kScalar || !is_floating(e.wanted.dtype) ||
      is_any_copy_wrong(e))
    return {};
  std::vector<double> offsets, factors;
  std::vector<int> ranks;
  for (const View* const view : e.bad_views()) {
    if (view->actual.numel() != 1) return {};
    const double seen = view->actual.flattened().item(), right = view->expected.flattened().item();
    ranks.push_back(view->rank);
    offsets.push_back(seen - right);
    if (right != 0) factors.push_back(seen / right);
  }
  if (offsets.empty()) return {};
  const bool have_factors = factors.size() == offsets.size();
  const bool is_one = std::ranges::all_of(
      offsets, [&](double offset) { return is_near(offset, offsets.front(), kAlike); });
  NamedValues values;
  if (!e.result.differing_axes.empty()) {
    values = {{"axes", names_of(e.result.differing_axes)}};
    values.push_back(NamedValue::words("before", phrase(PhraseId::kCopiesDifferOver, values)));
  }
  if (is_one) {
    values.emplace_back("offset", offsets.front());
    values.push_back(e.on_bad_ranks());
    if (have_factors) {
      values.emplace_back("scale", factors.front());
      values.push_back(NamedValue::words("or_factor", phrase(PhraseId::kOrFactor, values)));
    }
    return make_cause(CauseId::kNumberOff, std::move(values));
  }
  values.emplace_back("offsets", offsets);
  values.emplace_back("ranks", ranks);
  if (have_factors) {
    values.emplace_back("factors", factors);
    values.push_back(NamedValue::words("or_factors", phrase(PhraseId::kOrFactors, values)));
  }
  return make_cause(CauseId::kNumbersOff, std::move(values));
}

}  // namespace isoshard::detail
