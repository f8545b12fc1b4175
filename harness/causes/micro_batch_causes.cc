// SPDX-License-Identifier: Apache-2.0
/// Which micro-batches a gradient is made of.
///
/// A gradient is the sum of what each micro-batch, and in it each rank's samples, adds: dY^T X for
/// a weight, where dY is the gradient at its module's output and X the module's input; the rows of
/// dY by token id for an embedding; the sum of dY for a bias. Activations and their gradients are
/// in the reference's records, so the summands can be made again. Which activation is X is not
/// known: the nearest ones before the module are tried, and believed only if the summands add up to
/// the reference's gradient. A tied weight is used by two modules, whose summands are added: the
/// other one is a module without a weight of its own, as wide as the weight is long. Matrices are
/// never made whole: they are looked at through a few probes, G P for random columns P, which costs
/// little for weights of any size.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "harness/causes/run_causes.h"
#include "harness/ids/phrase.h"

namespace isoshard::detail {
namespace {

constexpr int kInputsTried = 24;
constexpr int kProbes = 4;
constexpr double kNearWeight = 0.02;

/// One use of a parameter: by a module, on what may be its input (empty for a bias; for the weight
/// of a norm the module's output, of which it is made again).
struct Use {
  std::string module, input;
};

/// What may be a module's input.
struct Input {
  Values values;  ///< undefined for none
  bool is_floating = false;
};

/// The summands of a gradient by micro-batch and slice of the samples, [micro-batches x slices], as
/// the probes see them.
struct Summands {
  int micro_batches = 0, slices = 1;
  Axis axis = Axis::kWorld;  ///< along which the slices lie; kWorld if there is but one
  std::vector<Values> pieces;
  /// The same pieces added up by the modules that use the weight, if these are several.
  std::vector<std::pair<std::string, Values>> uses;
};

class GradientParts {
 public:
  GradientParts(const Evidence& e, const View& view)
      : e_(e),
        module_(e.wanted.key.name.substr(0, e.wanted.key.name.rfind('.'))),
        micro_batches_(e.num_micro_batches()) {
    if (e.whole.dim() != 2) return;
    // Only the columns that the rank holds are looked at.
    const std::int64_t begin = view.box.global_offset[1] * kProbes,
                       end = begin + view.box.size[1] * kProbes;
    std::vector<double> probes(static_cast<std::size_t>(e.whole.size(1) * kProbes), 0);
    for (std::int64_t i = begin; i < end; ++i)
      probes[static_cast<std::size_t>(i)] = std::sin(static_cast<double>(i + 1) * 12.9898);
    probes_ = Values({e.whole.size(1), kProbes}, std::move(probes));
  }

  /// A gradient, or rows of it, as the probes see it.
  [[nodiscard]] Values seen(const Values& gradient) const {
    return probes_.defined() ? product(gradient, probes_) : gradient;
  }
  /// The same of what a rank holds.
  [[nodiscard]] Values seen(const View& view) const {
    return probes_.defined() ? product(view.actual, probes_.narrow(0, view.box.global_offset[1],
                                                                   view.box.size[1]))
                             : view.actual;
  }

  /// A single micro-batch says something only of pieces that ranks do not hold alike, and of a
  /// weight that two modules use: elsewhere copies are compared.
  std::optional<Summands> find(bool has_copies) const {
    const bool says_something = micro_batches_ > 1 || !has_copies || is_tied();
    return says_something ? found(split_of_samples()) : std::nullopt;
  }

  /// The summands of single samples.
  std::optional<Summands> find_samples() const {
    constexpr std::int64_t kMost = 64;
    if (!has_output_gradients(module_)) return std::nullopt;
    const std::int64_t samples = output_gradient(module_, 0).size(0);
    if (samples * micro_batches_ > kMost) return std::nullopt;
    for (int m = 1; m < micro_batches_; ++m)
      if (output_gradient(module_, m).size(0) != samples) return std::nullopt;
    return found({Axis::kWorld, static_cast<int>(samples)});
  }

  [[nodiscard]] const std::string& module() const { return module_; }

 private:
  /// Axis along which samples are split, and into how many slices.
  using Split = std::pair<Axis, int>;

  std::optional<Summands> found(const Split& split) const {
    if (e_.whole.dim() > 2 || !has_output_gradients(module_)) return std::nullopt;
    if (e_.whole.dim() == 1)
      return checked({{module_, e_.wanted.key.name.ends_with(".weight") ? module_ : ""}}, split);
    const std::string head = is_tied() ? other_user() : "";
    for (const std::string& input : inputs(module_)) {
      if (head.empty()) {
        if (auto summands = checked({{module_, input}}, split)) return summands;
        continue;
      }
      for (const std::string& head_input : inputs(head)) {
        if (auto summands = checked({{module_, input}, {head, head_input}}, split)) return summands;
      }
    }
    return std::nullopt;
  }

  RecordKey key(RecordKind kind, const std::string& name, int call) const {
    return {e_.wanted.key.step, kind, name, call};
  }

  Values output_gradient(const std::string& module, int m) const {
    const Record* record = e_.reference.find(key(RecordKind::kActivationGrad, module, m));
    return record == nullptr ? Values::zeros({0})
                             : e_.reference_value(record->key) / record->grad_scale;
  }

  bool has_output_gradients(const std::string& module) const {
    for (int m = 0; m < micro_batches_; ++m) {
      if (output_gradient(module, m).numel() == 0) return false;
    }
    return micro_batches_ > 0;
  }

  bool is_tied() const {
    const auto names = e_.options.num_names.find(e_.wanted.key.name);
    return names != e_.options.num_names.end() && names->second > 1;
  }

  /// The module that uses a tied weight besides the one it is named after; empty if none is found.
  std::string other_user() const {
    for (const Record& record : e_.reference.trace().ranks.at(0).records) {
      const RecordKey& found = record.key;
      const bool fits = found.kind == RecordKind::kActivation && found.step == e_.wanted.key.step &&
                        found.call == 0 && found.name != module_ &&
                        record.layout.global_shape.size() == 3 &&
                        record.layout.global_shape.back() == e_.whole.size(0);
      if (!fits || e_.reference.find({0, RecordKind::kParam, found.name + ".weight", 0}) != nullptr)
        continue;
      if (has_output_gradients(found.name)) return found.name;
    }
    return "";
  }

  /// Names of what may be the module's input: integer data, then the activations before it, nearest
  /// first.
  std::vector<std::string> inputs(const std::string& module) const {
    std::vector<std::string> data, before;
    for (const Record& record : e_.reference.trace().ranks.at(0).records) {
      if (record.key.step != e_.wanted.key.step || record.key.call != 0) continue;
      if (record.key.kind == RecordKind::kActivation && record.key.name == module) break;
      if (record.key.kind == RecordKind::kDataId) data.push_back(record.key.name);
      if (record.key.kind == RecordKind::kActivation) before.push_back(record.key.name);
    }
    std::reverse(before.begin(), before.end());
    before.resize(std::min<std::size_t>(before.size(), kInputsTried));
    data.insert(data.end(), before.begin(), before.end());
    return data;
  }

  /// Along which axis the samples are split in the run, and into how many slices.
  Split split_of_samples() const {
    const Record* record = e_.actual.ranks.front().find(key(RecordKind::kActivation, module_, 0));
    if (record == nullptr) return {Axis::kWorld, 1};
    for (const Placement& placement : record->layout.placements) {
      if (placement.kind == Placement::Kind::kShard && placement.dim == 0)
        return {placement.axis, e_.actual.mesh.degree(placement.axis)};
    }
    return {Axis::kWorld, 1};
  }

  /// What some samples add to the gradient, as the probes see it; undefined if the shapes do not
  /// fit.
  Values piece(const Input& input, const Values& dy) const {
    const Values rows = dy.rows();
    const Shape& shape = e_.whole.shape();
    if (shape.size() == 1) return shape[0] == rows.size(1) ? vector_piece(input, rows) : Values();
    if (!input.is_floating) {
      if (input.values.numel() != rows.size(0) || shape[1] != rows.size(1) ||
          input.values.min() < 0 || input.values.max() >= static_cast<double>(shape[0]))
        return {};
      return rows_by_id(input.values, product(rows, probes_), shape[0]);
    }
    if (input.values.dim() == 0) return {};
    const Values x = input.values.rows();
    if (x.size(0) != rows.size(0)) return {};
    if (shape[0] == rows.size(1) && shape[1] == x.size(1))
      return product(rows.transposed(), product(x, probes_));
    if (shape[0] == x.size(1) && shape[1] == rows.size(1))
      return product(x.transposed(), product(rows, probes_));
    return {};
  }

  /// Of a bias the sum of dY, of a norm's weight that of dY times what it scales, which is the
  /// module's output without bias and weight.
  Values vector_piece(const Input& output, const Values& rows) const {
    if (!output.values.defined()) return rows.sum(0);
    const Values weight = e_.parameter_read(module_ + ".weight"),
                 bias = e_.parameter_read(module_ + ".bias"), y = output.values.rows();
    const bool fits = weight.defined() && weight.shape() == e_.whole.shape() &&
                      !weight.any([](double w) { return w == 0; }) && y.shape() == rows.shape();
    if (!fits) return {};
    return (rows * (bias.defined() ? y - bias : y) / weight).sum(0);
  }

  /// Row i of the result is the sum of the rows with id i.
  static Values rows_by_id(const Values& ids, const Values& rows, std::int64_t count) {
    constexpr auto kWidth = static_cast<std::size_t>(kProbes);
    std::vector<double> sums(static_cast<std::size_t>(count) * kWidth, 0);
    const Values own = ids.contiguous();
    for (std::int64_t r = 0; r < rows.size(0); ++r) {
      const auto id = static_cast<std::size_t>(own.flat()[static_cast<std::size_t>(r)]);
      for (std::size_t k = 0; k < kWidth; ++k)
        sums[id * kWidth + k] += rows.flat()[static_cast<std::size_t>(r) * kWidth + k];
    }
    return {{count, kProbes}, std::move(sums)};
  }

  /// What one use adds, by slices of the samples of a micro-batch; empty if the shapes do not fit.
  std::vector<Values> slices_of(const Use& use, int m, int slices) const {
    const Values dy = output_gradient(use.module, m);
    Input input;
    for (const RecordKind kind : {RecordKind::kDataId, RecordKind::kActivation}) {
      if (input.values.defined() || e_.reference.find(key(kind, use.input, m)) == nullptr) continue;
      const HostTensor recorded = e_.reference.tensor(key(kind, use.input, m));
      input = {Values(recorded), is_floating(recorded.dtype)};
      if (const Values floats = floats_in_bits(input.values, recorded.dtype); floats.defined())
        input = {floats, true};
    }
    const Values& whole = input.values;
    if (!use.input.empty() && (!whole.defined() || whole.size(0) != dy.size(0))) return {};
    if (dy.size(0) % slices != 0) return {};
    const std::int64_t samples = dy.size(0) / slices;
    std::vector<Values> parts;
    for (int s = 0; s < slices; ++s) {
      const Input own{whole.defined() ? whole.narrow(0, s * samples, samples) : whole,
                      input.is_floating};
      Values part = piece(own, dy.narrow(0, s * samples, samples));
      if (!part.defined()) return {};
      parts.push_back(std::move(part));
    }
    return parts;
  }

  std::optional<Summands> checked(const std::vector<Use>& uses, const Split& split) const {
    Summands summands;
    summands.micro_batches = micro_batches_;
    std::tie(summands.axis, summands.slices) = split;
    const Values wanted = seen(e_.whole);
    Values sum = Values::zeros(wanted.shape());
    if (uses.size() > 1) {
      for (const Use& use : uses) summands.uses.emplace_back(use.module, sum);
    }
    for (int m = 0; m < micro_batches_; ++m) {
      std::vector<Values> parts;
      for (std::size_t u = 0; u < uses.size(); ++u) {
        std::vector<Values> own = slices_of(uses[u], m, summands.slices);
        if (own.empty()) return std::nullopt;
        for (const Values& part : own) {
          if (!summands.uses.empty()) summands.uses[u].second = summands.uses[u].second + part;
        }
        for (std::size_t s = 0; s < own.size() && !parts.empty(); ++s) own[s] = own[s] + parts[s];
        parts = std::move(own);
      }
      for (Values& part : parts) {
        sum = sum + part;
        summands.pieces.push_back(std::move(part));
      }
    }
    if (!(distance(sum, wanted) <= std::max(e_.tolerance(), 1e-3) * norm_of(wanted)))
      return std::nullopt;
    return summands;
  }

  const Evidence& e_;
  std::string module_;
  int micro_batches_;
  Values probes_;  ///< undefined for a vector
};

/// The weights with which pieces enter what a rank holds; empty if they do not explain it. Right
/// are weights of 1.
std::vector<double> weights_in(const Evidence& e, const GradientParts& parts,
                               const std::vector<Values>& pieces, const View& view) {
  std::vector<Values> rows;
  for (const Values& piece : pieces) {
    rows.push_back(piece.narrow(0, view.box.global_offset[0], view.box.size[0]));
  }
  const Values matrix = stacked(rows), target = parts.seen(view).flattened();
  // zeros fit weights of 0
  if (target.numel() < 2 * matrix.size(0) || norm_of(target) == 0) return {};
  std::vector<double> weights = best_weights(matrix, target);
  const double left = distance(weighted_sum(matrix, weights), target);
  if (!(left <= std::max(10 * e.tolerance(), 1e-3) * norm_of(target))) return {};
  // they must explain what is wrong, and not the noise of a coarse dtype
  const std::vector<double> right(weights.size(), 1);
  const double unexplained = e.is_wide() ? 0.05 : 0.25;
  if (left > unexplained * distance(weighted_sum(matrix, right), target)) return {};
  return weights;
}

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
    const GradientParts parts(e, *view);
    const std::optional<Summands> summands = parts.find_samples();
    if (!summands.has_value()) return {};
    const std::vector<double> weights = weights_in(e, parts, summands->pieces, *view);
    if (weights.empty()) return {};
    if (common.empty()) common = weights;
    for (std::size_t i = 0; i < common.size(); ++i) {
      if (!fits_weight(weights[i], common[i], near)) return {};
    }
    module = parts.module();
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
Cause missing_uses(const Evidence& e, const GradientParts& parts, const Summands& summands) {
  if (summands.uses.empty()) return {};
  std::vector<Values> pieces;
  for (const auto& [module, piece] : summands.uses) pieces.push_back(piece);
  std::set<std::size_t> missing;
  const std::vector<const View*> bad = e.bad_views();
  for (const View* const view : bad) {
    const std::vector<double> weights = weights_in(e, parts, pieces, *view);
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
  const GradientParts parts(e, *bad);
  const Held* held = e.held_by(bad->rank);
  const bool has_copies = held == nullptr || !is_flat(held->record->layout);
  const auto summands = parts.find(has_copies);
  if (!summands.has_value()) return cause_of_samples(e);
  if (Cause cause = missing_uses(e, parts, *summands); !cause.empty()) return cause;
  const std::vector<double> weights = weights_in(e, parts, summands->pieces, *bad);
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
