// SPDX-License-Identifier: Apache-2.0
/// Pools, and the width that redrawn runs give them.
#include "harness/verdict/pooled.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "core/observe/layer_name.h"
#include "harness/stats/student.h"
#include "harness/stats/tolerance.h"
#include "harness/trace/numbers.h"
#include "harness/verdict/neighbours.h"

namespace isoshard {
namespace {

/// What all pools of a family say of one of them counts as so many redrawn runs of its own.
constexpr double kRunsOfFamily = 4;
/// A family of fewer pools says nothing.
constexpr std::size_t kLeastFamily = 8;
/// Of a tensor so many elements are read for its fourth moment.
constexpr std::int64_t kMostRead = std::int64_t{1} << 16;

/// One tensor that takes part.
struct Item {
  const TensorComparison* comparison = nullptr;
  const std::vector<RedrawnSums>* redrawn = nullptr;
  double peak = 1;       ///< sqrt(sum r^4) / sum r^2
  double rms = 0;        ///< of the reference
  double least_var = 0;  ///< of the difference: what last roundings alone make of it
};

/// What one run, or one redrawn run, adds up over a pool.
struct Sums {
  double squares = 0;   ///< of the reference
  double dot_diff = 0;  ///< of reference x difference
  double shift = 0;     ///< of difference / rms
  /// Squares of what each element adds to dot_diff and shift; of dot_diff an estimate.
  double scale_sq = 0, shift_sq = 0;
  double numel = 0;

  [[nodiscard]] double scale_error() const { return squares > 0 ? dot_diff / squares : 0; }
  [[nodiscard]] double mean_shift() const { return numel > 0 ? shift / numel : 0; }
};

/// How many roots of the sum of squares a sum of independent errors without a preferred sign
/// exceeds with at most this chance, whatever their sizes are (Hoeffding's inequality given the
/// sizes).
double most_roots(double chance) {
  return std::sqrt(2 * std::log(2 / chance));
}

/// At most ten times as far as it reaches: pools of few elements still say something.
void reach(AllowedRange& range, double width) {
  constexpr double kMost = 10;
  width = std::min(width, kMost * std::max(-range.least, range.most));
  range = {std::min(range.least, -width), std::max(range.most, width)};
}

void add_squares(Sums& sums, const Item& item, const Stats& stats) {
  sums.scale_sq += stats.sum_sq_diff * stats.sum_sq_reference * item.peak * item.peak;
  sums.shift_sq += stats.sum_sq_diff / (item.rms * item.rms);
}

/// The same statistic of each redrawn run, and what independent errors would make of it.
struct Draws {
  double mean = 0;
  double mean_sq = 0;
  double independent_sq = 0;
  int runs = 0;

  /// The square of the runs' standard deviation.
  [[nodiscard]] double variance() const {
    return runs > 1 ? std::max(0.0, mean_sq - mean * mean) * runs / (runs - 1) : 0;
  }
};

struct Group {
  int step = 0;
  RecordKind kind = RecordKind::kGrad;
  std::string state;  ///< of optimizer states: "exp_avg"
  auto operator<=>(const Group&) const = default;
};

std::string words_of(const Group& group) {
  switch (group.kind) {
    case RecordKind::kGrad:
      return "gradients";
    case RecordKind::kActivation:
      return "activations";
    case RecordKind::kActivationGrad:
      return "activation gradients";
    case RecordKind::kOptimizer:
      return fmt::format("optimizer states {}", group.state);
    case RecordKind::kParam:
      return "parameters after the step";
    default:
      return std::string(name_of(group.kind));
  }
}

double peak_of(const Reference& reference, const Record& record, double sum_sq) {
  const std::int64_t numel = numel_of(record.layout.global_shape);
  const std::int64_t count = std::min(numel, kMostRead);
  if (count == 0 || !(sum_sq > 0) || !reference.has_bytes()) return 1;
  double second = 0, fourth = 0;
  const std::byte* bytes = reference.bytes(record);
  for (std::int64_t i = 0; i < count; ++i) {
    const double x = value_at(bytes, record.dtype, i * numel / count);
    second += x * x;
    fourth += x * x * x * x;
  }
  if (!(second > 0)) return 1;
  const double share = static_cast<double>(count) / static_cast<double>(numel);
  return std::min(1.0, std::sqrt(fourth * share) / second);
}

/// Whether `number` and that of each redrawn run are numbers of the dtype. A number that is summed
/// in fp64 or fp32, as a loss is, is one of 16 bits by chance only; the norm that PyTorch takes of
/// gradients in 16 bits is one always.
bool are_rounded_to(Dtype dtype, double number, const std::vector<RedrawnSums>& redrawn) {
  std::vector<double> numbers = {number};
  for (const RedrawnSums& run : redrawn) numbers.push_back(number + run.sum_diff);
  const std::vector<std::byte> rounded = bytes_of(numbers, dtype);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (value_at(rounded.data(), dtype, static_cast<std::int64_t>(i)) != numbers[i]) return false;
  }
  return true;
}

class Pools {
 public:
  Pools(const Reference& reference, const std::vector<TensorComparison>& tensors,
        const Trace& actual, const JudgePolicy& policy)
      : reference_(reference), actual_(actual), policy_(policy) {
    for (const TensorComparison& t : tensors) {
      if (const std::optional<Item> item = item_of(t))
        groups_[{t.key.step, t.key.kind, std::string(state_of(t.key))}].push_back(*item);
    }
  }

  std::vector<PooledComparison> run() {
    for (const auto& [group, items] : groups_) {
      if (group.kind == RecordKind::kScalar) {
        family(PoolOf::kTensor, each_alone(items));
        continue;
      }
      const std::string words = words_of(group);
      if (items.size() > 1) family(PoolOf::kAll, {{"all " + words, items}});
      family(PoolOf::kLayer, by_layer(words, items));
      family(PoolOf::kClass, by_class(words, items));
      ranks(words, items);
      family(PoolOf::kTensor, each_alone(items));
    }
    std::stable_sort(pools_.begin(), pools_.end(),
                     [](const PooledComparison& a, const PooledComparison& b) {
                       return std::tuple(a.first.step, a.stage) < std::tuple(b.first.step, b.stage);
                     });
    return std::move(pools_);
  }

 private:
  using Named = std::vector<std::pair<std::string, std::vector<Item>>>;

  std::optional<Item> item_of(const TensorComparison& t) const {
    const Stats& s = t.stats;
    if (t.level != Level::kPerturbed || is_gradient_besides(t.key) || t.insensitive ||
        t.unmasked_share != 1 || s.numel == 0 || !(s.sum_sq_reference > 0) ||
        s.nan_reference + s.inf_reference + s.nan_actual + s.inf_actual > 0)
      return std::nullopt;
    const Record* record = reference_.find(t.key);
    const auto found = reference_.redrawn().sums.find(t.key);
    if (record == nullptr || !is_floating(record->dtype) ||
        found == reference_.redrawn().sums.end() || found->second.size() < 2)
      return std::nullopt;
    const auto numel = static_cast<double>(s.numel);
    Item item{&t, &found->second, peak_of(reference_, *record, s.sum_sq_reference),
              std::sqrt(s.sum_sq_reference / numel)};
    const bool has_last_rounding =
        t.key.kind != RecordKind::kScalar ||
        (s.numel == 1 &&
         are_rounded_to(policy_.coarsest, number_of(reference_.tensor(t.key)), found->second));
    const Dtype rounded = has_last_rounding ? policy_.coarsest : Dtype::kFloat32;
    // of an element, half of what its last rounding may be: subnormal ones round alike
    item.least_var = std::pow(unit_roundoff(rounded) / 2, 2) * s.sum_sq_reference +
                     std::pow(least_positive(rounded) / 4, 2) * numel;
    return item;
  }

  static Sums sums_of(const std::vector<Item>& items) {
    Sums sums;
    for (const Item& item : items) {
      const Stats& s = item.comparison->stats;
      sums.squares += s.sum_sq_reference;
      sums.dot_diff += s.dot - s.sum_sq_reference;
      sums.shift += s.sum_diff / item.rms;
      add_squares(sums, item, s);
      sums.numel += static_cast<double>(s.numel);
    }
    return sums;
  }

  /// Of the redrawn runs that recorded all items.
  static std::pair<Draws, Draws> draws_of(const std::vector<Item>& items) {
    std::map<int, std::pair<std::size_t, Sums>> runs;
    double scale_sq = 0, shift_sq = 0, squares = 0, numel = 0;
    for (const Item& item : items) {
      const Stats& s = item.comparison->stats;
      double mean_sq_diff = 0;
      for (const RedrawnSums& run : *item.redrawn) {
        auto& [count, sums] = runs[run.run];
        ++count;
        sums.squares += s.sum_sq_reference;
        sums.dot_diff += run.dot_diff;
        sums.shift += run.sum_diff / item.rms;
        sums.numel += static_cast<double>(s.numel);
        mean_sq_diff += run.sum_sq_diff / static_cast<double>(item.redrawn->size());
      }
      mean_sq_diff = std::max(mean_sq_diff, item.least_var);
      scale_sq += mean_sq_diff * s.sum_sq_reference * item.peak * item.peak;
      shift_sq += mean_sq_diff / (item.rms * item.rms);
      squares += s.sum_sq_reference;
      numel += static_cast<double>(s.numel);
    }
    Draws scale, shift;
    for (const auto& [run, counted] : runs) {
      if (counted.first != items.size()) continue;
      scale.mean += counted.second.scale_error();
      shift.mean += counted.second.mean_shift();
      scale.mean_sq += std::pow(counted.second.scale_error(), 2);
      shift.mean_sq += std::pow(counted.second.mean_shift(), 2);
      ++scale.runs;
    }
    shift.runs = scale.runs;
    for (Draws* const draws : {&scale, &shift}) {
      draws->mean /= std::max(1, draws->runs);
      draws->mean_sq /= std::max(1, draws->runs);
    }
    scale.independent_sq = scale_sq / (squares * squares);
    shift.independent_sq = shift_sq / (numel * numel);
    return {scale, shift};
  }

  /// How much wider, on the average, the pools of a family are than independent errors would make
  /// them; 0: too few of them.
  static double common_of(const std::vector<Draws>& all) {
    if (all.size() < kLeastFamily) return 0;
    double sum = 0;
    for (const Draws& draws : all)
      sum += draws.independent_sq > 0 ? draws.variance() / draws.independent_sq : 0;
    return sum / static_cast<double>(all.size());
  }

  double quantile_of(double freedom, double chance) {
    const auto [found, is_new] = quantiles_.try_emplace({freedom, chance}, 0);
    if (is_new) found->second = student_quantile(freedom, chance);
    return found->second;
  }

  /// Of one more run: it may share roundings with the reference, as redrawn runs do not, so it may
  /// scatter around any point from the reference (0) to their mean.
  AllowedRange allowed_of(const Draws& draws, double common, double chance) {
    const double own = draws.runs - 1;
    const double others = common > 0 ? kRunsOfFamily : 0;
    const double variance =
        (draws.variance() * own + common * draws.independent_sq * others) / (own + others);
    const double width =
        quantile_of(own + others, chance) *
        std::sqrt(std::max(variance, draws.independent_sq) * (1 + 1.0 / draws.runs));
    return {std::min(0.0, draws.mean) - width, std::max(0.0, draws.mean) + width};
  }

  /// Of a part of what redrawn runs measured, `share` of its squares or elements: the mean of the
  /// whole says nothing of the part, so it counts as width. All of the whole's error may be the
  /// part's.
  AllowedRange allowed_of_part(const Draws& draws, double share) {
    const double width = quantile_of(draws.runs, kFalseAlarmOfPool) *
                         std::sqrt(std::max(draws.mean_sq, draws.independent_sq)) / share;
    return {-width, width};
  }

  void family(PoolOf pool, const Named& members) {
    if (members.empty()) return;
    std::vector<Draws> scales, shifts;
    for (const auto& [name, items] : members) {
      const auto [scale, shift] = draws_of(items);
      scales.push_back(scale);
      shifts.push_back(shift);
    }
    const double common_scale = common_of(scales), common_shift = common_of(shifts);
    const double chance =
        pool == PoolOf::kAll ||
                members.front().second.front().comparison->key.kind == RecordKind::kScalar
            ? kFalseAlarmOfAll
            : kFalseAlarmOfPool;
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (scales[i].runs < 2) continue;
      const auto& [name, items] = members[i];
      add(pool, name, items, sums_of(items), allowed_of(scales[i], common_scale, chance),
          allowed_of(shifts[i], common_shift, chance), scales[i].runs);
    }
  }

  void add(PoolOf pool, const std::string& name, const std::vector<Item>& items, const Sums& sums,
           const AllowedRange& allowed_scale_error, const AllowedRange& allowed_shift, int runs) {
    const TensorComparison& first = *items.front().comparison;
    PooledComparison p;
    p.pool = pool;
    p.name = name;
    p.first = first.key;
    p.stage = first.stage;
    p.tensors = static_cast<std::int64_t>(items.size());
    p.scale = 1 + sums.scale_error();
    p.shift = sums.mean_shift();
    AllowedRange scale_error = allowed_scale_error, shift = allowed_shift;
    // After a step of Adam a few elements may be far off, which redrawn runs show seldom.
    if (policy_.mask && first.key.step > groups_.begin()->first.step &&
        first.key.kind != RecordKind::kScalar) {
      const double roots =
          most_roots(kFalseAlarmOfPool) * std::sqrt(static_cast<double>(p.tensors));
      reach(scale_error, roots * std::sqrt(sums.scale_sq) / sums.squares);
      reach(shift, roots * std::sqrt(sums.shift_sq) / sums.numel);
    }
    p.allowed_scale = {1 + scale_error.least, 1 + scale_error.most};
    p.allowed_shift = shift;
    p.runs = runs;
    p.within = p.allowed_scale.holds(p.scale) && p.allowed_shift.holds(p.shift);
    pools_.push_back(std::move(p));
  }

  static Named each_alone(const std::vector<Item>& items) {
    Named result;
    for (const Item& item : items) result.push_back({subject_of(item.comparison->key), {item}});
    return result;
  }

  static Named of_several(std::map<std::string, std::vector<Item>> pools) {
    Named result;
    for (auto& [name, items] : pools) {
      if (items.size() > 1) result.emplace_back(name, std::move(items));
    }
    return result;
  }

  static Named by_layer(const std::string& words, const std::vector<Item>& items) {
    std::map<std::string, std::vector<Item>> pools;
    for (const Item& item : items) {
      const std::string& name = item.comparison->key.name;
      if (const auto layer = layer_in(name))
        pools[fmt::format("{} of {}", words, name.substr(0, layer->end))].push_back(item);
    }
    return of_several(std::move(pools));
  }

  static Named by_class(const std::string& words, const std::vector<Item>& items) {
    std::map<std::string, std::vector<Item>> pools;
    for (const Item& item : items) {
      const std::string& name = item.comparison->key.name;
      const auto layer = layer_in(name);
      if (!layer.has_value() || layer->end >= name.size()) continue;
      pools[fmt::format("{} of all {}", words, name.substr(layer->end + 1))].push_back(item);
    }
    return of_several(std::move(pools));
  }

  /// What each rank holds, where that is less than everything.
  void ranks(const std::string& words, const std::vector<Item>& items) {
    std::map<RecordKey, const Item*> by_key;
    for (const Item& item : items) by_key[item.comparison->key] = &item;
    for (const RankTrace& rank : actual_.ranks) {
      std::vector<Item> held;
      Sums sums;
      for (const Record& record : rank.records) {
        const auto found = by_key.find(record.key);
        if (found == by_key.end() || is_partial(record.layout)) continue;
        const Stats stats = stats_of(record);
        if (stats.numel == 0) continue;
        sums.squares += stats.sum_sq_reference;
        sums.dot_diff += stats.dot - stats.sum_sq_reference;
        sums.shift += stats.sum_diff / found->second->rms;
        add_squares(sums, *found->second, stats);
        sums.numel += static_cast<double>(stats.numel);
        held.push_back(*found->second);
      }
      const Sums whole = sums_of(held);
      constexpr double kEverything = 0.999;
      if (held.size() < 2 || !(sums.squares > 0) || sums.squares > kEverything * whole.squares)
        continue;
      const auto [scale, shift] = draws_of(held);
      if (scale.runs < 2) continue;
      add(PoolOf::kRank, fmt::format("{} on rank {}", words, rank.rank), held, sums,
          allowed_of_part(scale, sums.squares / whole.squares),
          allowed_of_part(shift, sums.numel / whole.numel), scale.runs);
    }
  }

  const Reference& reference_;
  const Trace& actual_;
  const JudgePolicy& policy_;
  std::map<Group, std::vector<Item>> groups_;
  std::map<std::pair<double, double>, double> quantiles_;  ///< by degrees of freedom and chance
  std::vector<PooledComparison> pools_;
};

}  // namespace

std::vector<PooledComparison> pooled_comparisons(const Reference& reference,
                                                 const std::vector<TensorComparison>& tensors,
                                                 const Trace& actual, const JudgePolicy& policy) {
  if (size_of(policy.coarsest) != 2 || reference.redrawn().runs == 0) return {};
  return Pools(reference, tensors, actual, policy).run();
}

}  // namespace isoshard
