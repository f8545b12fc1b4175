// SPDX-License-Identifier: Apache-2.0
#include "harness/causes/view/gradient_parts.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace isoshard::detail {
namespace {

constexpr int kInputsTried = 24;
constexpr int kProbes = 4;

/// One use of a parameter: by a module, on what may be its input (empty for a bias; for the weight
/// of a norm the module's output, of which it is made again).
struct Use {
  std::string module, input;
};

/// An activation that may be a module's input.
struct Input {
  Values values;  ///< undefined for none
  bool is_floating = false;
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

  std::optional<Summands> find(bool has_copies) const {
    const bool says_something = micro_batches_ > 1 || !has_copies || is_tied();
    return says_something ? found(split_of_samples()) : std::nullopt;
  }

  std::optional<Summands> find_samples() const {
    constexpr std::int64_t kMost = 64;
    if (!has_output_gradients(module_)) return std::nullopt;
    const std::int64_t samples = output_gradient(module_, 0).size(0);
    if (samples * micro_batches_ > kMost) return std::nullopt;
    for (int m = 1; m < micro_batches_; ++m)
      if (output_gradient(module_, m).size(0) != samples) return std::nullopt;
    return found({Axis::kWorld, static_cast<int>(samples)});
  }

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

  /// The gradient that some samples contribute, at the probes; undefined if the shapes do not
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

  /// The gradient of a bias is the sum of dY. That of a norm's weight is the sum of dY times the
  /// normalized input, which is the module's output without bias and weight.
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

  /// The gradient of one use by slices of a micro-batch's samples; empty if the shapes do not fit.
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
    Summands summands{.module = module_, .micro_batches = micro_batches_, .probes = probes_};
    std::tie(summands.axis, summands.slices) = split;
    const Values wanted = probes_.defined() ? product(e_.whole, probes_) : e_.whole;
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

}  // namespace

Values Summands::seen(const View& view) const {
  return probes.defined()
             ? product(view.actual, probes.narrow(0, view.box.global_offset[1], view.box.size[1]))
             : view.actual;
}

std::optional<Summands> summands_of_micro_batches(const Evidence& e, const View& view,
                                                  bool has_copies) {
  return GradientParts(e, view).find(has_copies);
}

std::optional<Summands> summands_of_samples(const Evidence& e, const View& view) {
  return GradientParts(e, view).find_samples();
}

std::vector<double> weights_in(const Evidence& e, const View& view, const Summands& summands,
                               const std::vector<Values>& pieces) {
  std::vector<Values> rows;
  for (const Values& piece : pieces) {
    rows.push_back(piece.narrow(0, view.box.global_offset[0], view.box.size[0]));
  }
  const Values matrix = stacked(rows), target = summands.seen(view).flattened();
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

}  // namespace isoshard::detail
