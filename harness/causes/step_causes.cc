// SPDX-License-Identifier: Apache-2.0
/// Steps of parameters: not made, made on a part only, made without the weight decay, or made of a
/// part of a matrix where all of it is to be taken.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/observe/hyperparameters.h"
#include "harness/causes/class_causes.h"
#include "harness/causes/run_causes.h"
#include "harness/ids/phrase.h"
#include "harness/trace/masked_steps.h"
#include "harness/verdict/neighbours.h"

namespace isoshard::detail {
namespace {

constexpr std::int64_t kLeastSteps = 12;

bool is_stepped(const RecordKey& key) {
  return stage_of(key) == Stage::kParameterAfterStep || !stepped_parameter(key).empty();
}

/// What each element did, against what it should have done.
struct Steps {
  std::vector<bool> is_kept, is_clear;  ///< as before; and whether the right step is clearly seen
  std::int64_t kept = 0, made = 0;      ///< of the clear ones
  bool is_mixed = false;                ///< some clear element is neither as before nor right
  /// Every kept one has the very number of before, and its step is far above what rounding makes of
  /// one: that does not happen to an element by chance.
  bool is_exactly_kept = true;
};

Steps steps_of(const Evidence& e, const View& view, const Values& before) {
  constexpr double kStepsOfRounding = 8, kFarSteps = 1024;
  const Values old = before.contiguous(), actual = view.actual.contiguous(),
               expected = view.expected.contiguous();
  const double coarse = e.options.coarsest == Dtype::kFloat64   ? 0x1p-52
                        : e.options.coarsest == Dtype::kFloat32 ? 0x1p-23
                                                                : 0x1p-8;
  Steps steps;
  for (std::size_t i = 0; i < old.flat().size(); ++i) {
    const double right = expected.flat()[i] - old.flat()[i],
                 made = actual.flat()[i] - old.flat()[i];
    const double noise = kStepsOfRounding * coarse * std::fabs(old.flat()[i]);
    const bool is_clear = std::fabs(right) > 4 * noise && right != 0;
    const bool is_kept = std::fabs(made) <= 0.02 * std::fabs(right);
    const bool is_right = std::fabs(made - right) <= 0.25 * std::fabs(right) + noise;
    steps.is_clear.push_back(is_clear);
    steps.is_kept.push_back(is_kept);
    if (!is_clear) continue;
    if (is_kept) {
      ++steps.kept;
      steps.is_exactly_kept = steps.is_exactly_kept && made == 0 &&
                              std::fabs(right) > kFarSteps * coarse * std::fabs(old.flat()[i]);
    }
    if (is_right) ++steps.made;
    steps.is_mixed = steps.is_mixed || (!is_kept && !is_right);
  }
  return steps;
}

/// Slices along `dim` of which no clear element was stepped; nothing if some slice is of both
/// kinds, or all are of one.
std::optional<std::set<std::int64_t>> kept_slices(const View& view, const Steps& steps,
                                                  std::size_t dim) {
  const Shape& size = view.box.size;
  std::int64_t inner = 1;
  for (std::size_t d = dim + 1; d < size.size(); ++d) inner *= size[d];
  std::set<std::int64_t> kept, made;
  for (std::size_t i = 0; i < steps.is_clear.size(); ++i) {
    const std::int64_t slice = static_cast<std::int64_t>(i) / inner % size[dim];
    if (steps.is_clear[i]) (steps.is_kept[i] ? kept : made).insert(slice);
  }
  const bool is_apart =
      std::ranges::none_of(kept, [&](std::int64_t slice) { return made.contains(slice); });
  return is_apart && !made.empty() && !kept.empty() ? std::optional(kept) : std::nullopt;
}

/// "3", "0..7", "0, 2, 4, ..." of sorted numbers, moved by `offset`.
std::string in_runs(const std::set<std::int64_t>& numbers, std::int64_t offset) {
  const std::int64_t first = *numbers.begin() + offset, last = *numbers.rbegin() + offset;
  if (last - first + 1 == std::ssize(numbers))
    return first == last ? fmt::format("{}", first) : fmt::format("{}..{}", first, last);
  constexpr int kShown = 8;
  std::vector<std::string> words;
  for (const std::int64_t number : numbers) {
    if (std::ssize(words) == kShown) {
      words.emplace_back("...");
      break;
    }
    words.push_back(fmt::format("{}", number + offset));
  }
  return fmt::format("{}", fmt::join(words, ", "));
}

/// The dp rank whose piece of the parameter's gradient or state holds just these elements, if the
/// run cuts it over dp: begins and ends of the kept elements as flat places of the whole tensor.
std::optional<int> owner_of(const Evidence& e, std::int64_t first, std::int64_t last) {
  const std::string name(stepped_parameter(e.wanted.key));
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* piece = rank.find({e.wanted.key.step, RecordKind::kGrad, name, 0});
    if (piece == nullptr || !is_flat(piece->layout) || piece->parts.empty()) continue;
    const FlatRange &begin = piece->parts.front().range, &end = piece->parts.back().range;
    if (end.global_begin + end.count - begin.global_begin == numel_of(e.wanted.layout.global_shape))
      continue;
    // the ends may be elements whose step is too small to be seen
    const bool is_inside =
        begin.global_begin <= first && last < end.global_begin + end.count &&
        2 * (last - first + 1) > end.global_begin + end.count - begin.global_begin;
    if (is_inside) return e.actual.mesh.coordinate(rank.rank, Axis::kDp);
  }
  return std::nullopt;
}

/// The dp rank that alone has a piece of the parameter's gradient, of a run that cuts all of them
/// in flat pieces.
std::optional<int> only_owner_of(const Evidence& e) {
  const RecordKey key{e.wanted.key.step, RecordKind::kGrad,
                      std::string(stepped_parameter(e.wanted.key)), 0};
  std::set<int> owners;
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* piece = rank.find(key);
    const bool is_piece = piece != nullptr && piece->layout.explicit_parts && !piece->parts.empty();
    if (is_piece && !is_flat(piece->layout)) return std::nullopt;
    if (is_piece) owners.insert(e.actual.mesh.coordinate(rank.rank, Axis::kDp));
  }
  if (owners.size() != 1 || e.actual.mesh.degree(Axis::kDp) == 1) return std::nullopt;
  return *owners.begin();
}

/// What is not updated, and whose part it is, if that is known.
NamedValues with_owner(NamedValues values, std::optional<int> owner) {
  if (!owner.has_value()) return values;
  values.emplace_back("dp_rank", *owner);
  values.push_back(
      NamedValue::words("owner", phrase(PhraseId::kPartOfDpRank, {{"dp_rank", *owner}})));
  return values;
}

Cause cause_of_kept(const Evidence& e, const View& view, const Steps& steps) {
  const NamedValue where = e.on_bad_ranks();
  std::int64_t first = -1, last = -1;
  for (std::size_t i = 0; i < steps.is_clear.size(); ++i) {
    if (!steps.is_clear[i] || !steps.is_kept[i]) continue;
    first = first < 0 ? static_cast<std::int64_t>(i) : first;
    last = static_cast<std::int64_t>(i);
  }
  const bool is_whole = view.box.size == e.wanted.layout.global_shape;
  const std::optional<int> owner = is_whole ? owner_of(e, first, last) : std::nullopt;
  if (view.box.size.size() == 2) {
    for (const std::size_t dim : {std::size_t{0}, std::size_t{1}}) {
      const auto slices = kept_slices(view, steps, dim);
      if (!slices.has_value()) continue;
      const std::int64_t offset = view.box.global_offset[dim];
      NamedValues values = {NamedValue::words("runs", in_runs(*slices, offset)), where};
      std::set<std::int64_t> all;
      for (const std::int64_t slice : *slices) all.insert(slice + offset);
      values.emplace_back(dim == 0 ? "rows" : "columns", all);
      return make_cause(dim == 0 ? CauseId::kRowsNotUpdated : CauseId::kColumnsNotUpdated,
                        with_owner(std::move(values), owner));
    }
  }
  const bool is_one_run = [&] {
    for (auto i = static_cast<std::size_t>(first); i <= static_cast<std::size_t>(last); ++i) {
      if (steps.is_clear[i] && !steps.is_kept[i]) return false;
    }
    return true;
  }();
  if (is_one_run && is_whole) {
    NamedValues values = {
        {"first", first}, {"last", last}, {"elements", steps.is_clear.size()}, where};
    values.push_back(NamedValue::words(
        "which", phrase(first == last ? PhraseId::kElement : PhraseId::kElements, values)));
    return make_cause(CauseId::kRunNotUpdated, with_owner(std::move(values), owner));
  }
  return make_cause(CauseId::kElementsNotUpdated,
                    {{"kept", steps.kept}, {"elements", steps.kept + steps.made}, where});
}

/// How much of the values before the step the wrong step has besides the right one, in units of
/// them; nothing if it is no multiple of them.
std::optional<double> decay_besides(const Evidence& e, const View& view, const Values& before,
                                    const Values& gradient) {
  const Values old = before.contiguous(), grad = gradient.contiguous(),
               expected = view.expected.contiguous(),
               difference = (view.actual - view.expected).contiguous();
  const double typical =
      norm_of(grad) / std::sqrt(static_cast<double>(std::max<std::int64_t>(1, grad.numel())));
  double products = 0, squares = 0;
  std::int64_t count = 0;
  // Where the gradient is noise the step is, too.
  const auto counts = [&](std::size_t i) {
    const double size = std::fabs(grad.flat()[i]);
    return old.flat()[i] != 0 && (size == 0 || size >= 0.2 * typical);
  };
  for (std::size_t i = 0; i < old.flat().size(); ++i) {
    if (!counts(i)) continue;
    ++count;
    products += old.flat()[i] * difference.flat()[i];
    squares += old.flat()[i] * old.flat()[i];
  }
  if (count < kLeastSteps || squares == 0) return std::nullopt;
  const double factor = products / squares;
  const double rounding = e.options.coarsest == Dtype::kFloat64 ? 0x1p-50 : 0x1p-22;
  for (std::size_t i = 0; i < old.flat().size(); ++i) {
    if (!counts(i)) continue;
    const double wanted = factor * old.flat()[i],
                 size = std::max(std::fabs(old.flat()[i]), std::fabs(expected.flat()[i]));
    if (!(std::fabs(difference.flat()[i] - wanted) <= 0.05 * std::fabs(wanted) + rounding * size))
      return std::nullopt;
  }
  // a factor that rounding could make says nothing
  return std::fabs(factor) > 8 * rounding ? std::optional(factor) : std::nullopt;
}

double rate_of(const Evidence& e) {
  if (const auto rate = e.scalar(e.wanted.key.step, NameRole::kLearningRate)) return *rate;
  return e.options.step_rule.has_value() ? e.options.step_rule->learning_rate : 0;
}

/// Which rate the decay has that was applied, if it is not the step's own: that of another step, or
/// the one that schedules start from, or none. Empty if it is left out or applied twice.
Cause other_rate_of_decay(const Evidence& e, double rate, double applied) {
  constexpr double kNear = 1e-3;
  const double decay = e.options.step_rule->weight_decay, base = e.options.step_rule->learning_rate;
  const double used = applied / decay;
  if (is_near(used, 2 * rate, 0.02) || std::fabs(used) <= 0.02 * std::max(rate, 1e-9)) return {};
  const NamedValue where = e.on_bad_ranks();
  if (is_near(used, base, kNear))
    return make_cause(CauseId::kDecayWithRateOfSettings,
                      {{"decay", decay}, {"used", base}, {"rate", rate}, where});
  for (int step = 0; step <= e.wanted.key.step + 1; ++step) {
    if (step == e.wanted.key.step) continue;
    const std::optional<double> other = e.scalar(step, NameRole::kLearningRate);
    if (other.has_value() && is_near(used, *other, kNear))
      return make_cause(CauseId::kDecayWithRateOfStep,
                        {{"decay", decay}, {"step", step}, {"used", used}, {"rate", rate}, where});
  }
  return is_near(used, 1, kNear) ? make_cause(CauseId::kDecayWithoutRate, {{"decay", decay}, where})
                                 : Cause();
}

/// Whether each wrong rank holds the bytes of its own earlier record.
bool is_bitwise_as(const Evidence& e, const RecordKey& before) {
  for (const int rank : e.bad_ranks()) {
    const Held* h = e.held_by(rank);
    const Record* old = h == nullptr ? nullptr : h->rank->find(before);
    if (old == nullptr || old->parts.empty() || old->parts.size() != h->record->parts.size())
      return false;
    for (std::size_t i = 0; i < old->parts.size(); ++i) {
      if (old->parts[i].digest != h->record->parts[i].digest) return false;
    }
  }
  return true;
}

}  // namespace

Cause cause_not_updated(const Evidence& e) {
  if (e.wanted.key.kind != RecordKind::kParam || is_of_loading(e.wanted.key) ||
      stage_of(e.wanted.key) != Stage::kParameterAfterStep ||
      !is_bitwise_as(e, record_before(e.wanted.key)))
    return {};
  return make_cause(CauseId::kNotUpdated, with_owner({e.on_bad_ranks()}, only_owner_of(e)));
}

Cause cause_state_as_before(const Evidence& e) {
  RecordKey before = e.wanted.key;
  --before.step;
  if (e.wanted.key.kind != RecordKind::kOptimizer || before.step < 0 || !is_bitwise_as(e, before))
    return {};
  return make_cause(CauseId::kNotUpdated, {e.on_bad_ranks()});
}

Cause cause_part_not_updated(const Evidence& e) {
  if (!is_stepped(e.wanted.key)) return {};
  const RecordKey key = before_step(e.wanted.key);
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || e.reference.find(key) == nullptr) return {};
  const Values before = e.reference_value(key);
  if (before.shape() != e.wanted.layout.global_shape) return {};
  Cause cause;
  for (const View* view : bad) {
    const Steps steps = steps_of(e, *view, before.cut(view->box.global_offset, view->box.size));
    if (steps.is_mixed || steps.kept + steps.made < kLeastSteps) return {};
    if (steps.kept == 0) continue;
    if (steps.kept < kLeastSteps && !(steps.is_exactly_kept && steps.made >= kLeastSteps))
      return {};
    if (cause.empty())
      cause = steps.made == 0 ? make_cause(CauseId::kAsBeforeStep, {e.on_bad_ranks()})
                              : cause_of_kept(e, *view, steps);
  }
  return cause;
}

Cause cause_weight_decay(const Evidence& e) {
  const double rate = rate_of(e);
  if (!is_stepped(e.wanted.key) || !e.options.step_rule.has_value() ||
      e.options.step_rule->weight_decay == 0)
    return {};
  const RecordKey key = before_step(e.wanted.key);
  const RecordKey gradient{e.wanted.key.step, RecordKind::kGrad,
                           std::string(stepped_parameter(e.wanted.key)), 0};
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || e.reference.find(key) == nullptr || e.reference.find(gradient) == nullptr)
    return {};
  const Values before = e.reference_value(key), grad = e.reference_value(gradient);
  const double decay = rate * e.options.step_rule->weight_decay;
  std::optional<double> common;
  for (const View* view : bad) {
    const Shape &offset = view->box.global_offset, &size = view->box.size;
    const auto found = decay_besides(e, *view, before.cut(offset, size), grad.cut(offset, size));
    if (!found.has_value() || (common.has_value() && !is_near(*found, *common, 0.02))) return {};
    common = found;
  }
  if (is_near(decay - *common, decay, 0.02)) return {};
  if (Cause other = other_rate_of_decay(e, rate, decay - *common); !other.empty()) return other;
  if (decay == 0) return {};
  const double times = 1 - *common / decay;  // how often it was applied
  const CauseId id = std::fabs(times) < 0.02   ? CauseId::kDecayLeftOut
                     : is_near(times, 2, 0.02) ? CauseId::kDecayAppliedTwice
                                               : CauseId::kDecayAppliedTimes;
  return make_cause(id, {{"rate", rate},
                         {"decay", e.options.step_rule->weight_decay},
                         {"times", times},
                         e.on_bad_ranks()});
}

Cause cause_in_hyperparameters(const Evidence& e) {
  if (role_of(e.wanted.key) != NameRole::kHyperparameters) return {};
  const View* const bad = e.first_bad_view();
  if (bad == nullptr) return {};
  const Values actual = bad->actual.contiguous(), expected = bad->expected.contiguous();
  for (std::size_t i = 0; i < std::min(actual.flat().size(), kHyperparameters.size()); ++i) {
    if (actual.flat()[i] == expected.flat()[i]) continue;
    return make_cause(CauseId::kHyperparametersDiffer, {{"name", kHyperparameters[i]},
                                                        {"parameter", parsed(e.wanted.key).base},
                                                        {"actual", actual.flat()[i]},
                                                        {"expected", expected.flat()[i]},
                                                        e.on_bad_ranks()});
  }
  return {};
}

namespace {

/// The share of a^T b, two matrices of one shape, that is not symmetric: 0 if it is symmetric, and
/// about 1 if a and b have nothing to do with each other.
///
/// It is 0 for each b that has the singular vectors of a, and for their columns alone.
double asymmetry(const Values& a, const Values& b) {
  const std::int64_t rows = a.size(0), columns = a.size(1);
  const auto x = a.flat(), y = b.flat();
  std::vector<double> product(static_cast<std::size_t>(columns * columns), 0.0);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto of_x = x.subspan(static_cast<std::size_t>(row * columns));
    const auto of_y = y.subspan(static_cast<std::size_t>(row * columns));
    for (std::size_t i = 0; i < static_cast<std::size_t>(columns); ++i)
      for (std::size_t j = 0; j < static_cast<std::size_t>(columns); ++j)
        product[i * static_cast<std::size_t>(columns) + j] += of_x[i] * of_y[j];
  }
  double squares = 0, differences = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(columns); ++i) {
    for (std::size_t j = 0; j < static_cast<std::size_t>(columns); ++j) {
      const double here = product[i * static_cast<std::size_t>(columns) + j];
      const double there = product[j * static_cast<std::size_t>(columns) + i];
      squares += here * here;
      differences += (here - there) * (here - there);
    }
  }
  return squares > 0 ? std::sqrt(differences / squares) / 2 : 1;
}

/// Of both products, so that rows and columns of a part are looked at.
double asymmetry_of_both(const Values& gradient, const Values& step) {
  const Values g = gradient.contiguous(), s = step.contiguous();
  return std::max(asymmetry(g, s),
                  asymmetry(g.transposed().contiguous(), s.transposed().contiguous()));
}

}  // namespace

Cause cause_of_own_matrices(const Evidence& e) {
  constexpr double kSymmetric = 0.01, kClearlyNot = 0.1;
  constexpr std::int64_t kMostMultiplied = std::int64_t{1} << 28, kLongest = 4096;
  const Shape& shape = e.wanted.layout.global_shape;
  if (stage_of(e.wanted.key) != Stage::kParameterAfterStep || shape.size() != 2 ||
      std::min(shape[0], shape[1]) < 2 || std::max(shape[0], shape[1]) > kLongest ||
      shape[0] * shape[1] * std::max(shape[0], shape[1]) > kMostMultiplied)
    return {};
  const RecordKey read = before_step(e.wanted.key);
  const RecordKey made{e.wanted.key.step, RecordKind::kGrad, e.wanted.key.name, 0};
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || e.reference.find(read) == nullptr || e.reference.find(made) == nullptr)
    return {};
  const Values before = e.reference_value(read), gradient = e.reference_value(made);
  if (before.shape() != shape || gradient.shape() != shape) return {};
  if (asymmetry_of_both(gradient, e.whole - before) > kSymmetric) return {};
  bool differs = false;
  for (const View* const view : bad) {
    const Box& box = view->box;
    if (box.size == shape || std::min(box.size[0], box.size[1]) < 2) return {};
    const Values own = gradient.cut(box.global_offset, box.size);
    const Values old = before.cut(box.global_offset, box.size);
    if (asymmetry_of_both(own, view->actual - old) > kSymmetric) return {};
    differs = differs || asymmetry_of_both(own, view->expected - old) > kClearlyNot;
  }
  return differs ? make_cause(CauseId::kStepOfOwnMatrix, {e.on_bad_ranks()}) : Cause();
}

}  // namespace isoshard::detail
