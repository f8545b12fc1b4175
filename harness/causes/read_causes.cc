// SPDX-License-Identifier: Apache-2.0
/// Causes that lie in what was read: masks drawn alike, parameters of an earlier step, buffers that
/// hold something else.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "harness/causes/run_causes.h"

namespace isoshard::detail {
namespace {

constexpr int kInputsTried = 24;
constexpr int kStepsBack = 4;
constexpr std::int64_t kMostSearched = std::int64_t{1} << 24;

/// The parameters of the module whose output diverges, as read in a step: as read at the beginning,
/// or as the step before left them.
struct ModuleParameters {
  at::Tensor weight, bias;  ///< undefined if the module has none
};

RecordKey read_in(int step, std::string name) {
  if (step == 0) return {0, RecordKind::kParam, std::move(name), 0};
  return {step - 1, RecordKind::kParam, std::move(name), step == 1 ? 1 : 0};
}

ModuleParameters parameters_read_in(const Evidence& e, int step) {
  ModuleParameters found;
  for (const auto& [suffix, place] :
       {std::pair{".weight", &found.weight}, std::pair{".bias", &found.bias}}) {
    const RecordKey key = read_in(step, e.wanted.key.name + suffix);
    if (e.reference.find(key) != nullptr) *place = e.reference.tensor(key).to(at::kDouble);
  }
  return found;
}

/// The samples and tokens of a whole tensor [batch, sequence, ...] that a view has.
at::Tensor rows_of(at::Tensor whole, const View& view) {
  for (std::size_t d = 0; d < 2; ++d)
    whole = whole.narrow(static_cast<std::int64_t>(d), view.box.global_offset[d], view.box.size[d]);
  return whole;
}

/// What the view should hold if the module had read `old` instead of `now`: every way in which a
/// module of these shapes may use them. Inputs are the nearest activations before it, and integer
/// data.
std::vector<at::Tensor> outputs_with(const Evidence& e, const View& view,
                                     const ModuleParameters& now, const ModuleParameters& old) {
  std::vector<at::Tensor> outputs;
  const auto last = static_cast<std::size_t>(view.box.size.size() - 1);
  const std::int64_t begin = view.box.global_offset[last], features = view.box.size[last];
  const auto own = [&](const at::Tensor& vector) { return vector.narrow(0, begin, features); };
  const bool fits_bias =
      now.bias.defined() && now.bias.dim() == 1 && now.bias.size(0) >= begin + features;
  const at::Tensor shift =
      fits_bias ? own(old.bias) - own(now.bias) : at::zeros({features}, at::kDouble);
  if (!now.weight.defined()) return outputs;
  if (now.weight.dim() == 1) {
    if (now.weight.size(0) < begin + features) return outputs;
    const at::Tensor bias = fits_bias ? own(now.bias) : at::zeros({features}, at::kDouble);
    outputs.push_back((view.expected - bias) / own(now.weight) * own(old.weight) + bias + shift);
    return outputs;
  }
  if (now.weight.dim() != 2 || view.box.size.size() < 2) return outputs;
  const at::Tensor change = old.weight - now.weight;
  std::vector<RecordKey> before;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    const RecordKey& key = record.key;
    if (key.step != e.wanted.key.step || key.call != e.wanted.key.call) continue;
    if (key == e.wanted.key) break;
    const Shape& shape = record.layout.global_shape;
    const bool is_input = key.kind == RecordKind::kActivation || key.kind == RecordKind::kDataId;
    if (is_input && shape.size() >= 2 && shape[0] == e.wanted.layout.global_shape[0] &&
        shape[1] == e.wanted.layout.global_shape[1])
      before.push_back(key);
  }
  std::reverse(before.begin(), before.end());
  before.resize(std::min<std::size_t>(before.size(), kInputsTried));
  for (const RecordKey& key : before) {
    const at::Tensor input = rows_of(e.reference.tensor(key), view);
    if (!input.is_floating_point()) {
      const bool is_lookup = input.dim() == 2 && change.size(1) >= begin + features &&
                             input.min().item<std::int64_t>() >= 0 &&
                             input.max().item<std::int64_t>() < change.size(0);
      if (is_lookup)
        outputs.push_back(view.expected + change.narrow(1, begin, features).index({input}));
      continue;
    }
    if (input.dim() < 3) continue;
    const at::Tensor x = input.flatten(2).to(at::kDouble);
    if (x.size(-1) == change.size(1) && change.size(0) >= begin + features)
      outputs.push_back(view.expected + x.matmul(change.narrow(0, begin, features).t()) + shift);
    if (x.size(-1) == change.size(0) && change.size(1) >= begin + features)
      outputs.push_back(view.expected + x.matmul(change.narrow(1, begin, features)) + shift);
  }
  return outputs;
}

std::string stale_parameters(const Evidence& e, const View& bad) {
  if (bad.box.size.empty()) return "";
  const int step = e.wanted.key.step;
  const ModuleParameters now = parameters_read_in(e, step);
  const double error = norm_of(bad.actual - bad.expected);
  for (int back = 1; back <= std::min(step, kStepsBack); ++back) {
    for (const at::Tensor& output : outputs_with(e, bad, now, parameters_read_in(e, step - back))) {
      if (output.sizes() != bad.actual.sizes() || !e.explains(output, bad.actual, error)) continue;
      const auto axis = e.axis_of(e.bad_ranks());
      const std::string where = axis.has_value()
                                    ? e.coordinates_in_words(e.bad_ranks(), *axis)
                                    : fmt::format("rank{} {}", e.bad_ranks().size() == 1 ? "" : "s",
                                                  fmt::join(e.bad_ranks(), ", "));
      return fmt::format("parameters read in step {}: {}.weight stale by {} step{} on {}", step,
                         e.wanted.key.name, back, back == 1 ? "" : "s", where);
    }
  }
  return "";
}

/// How many features of the output are wrong, if they are the first ones; whether they are off by
/// the same row for every token, and whether each is the right one times a factor of its own.
struct WrongFeatures {
  std::int64_t count = 0, all = 0;
  bool is_one_row = false, is_scaled = false;
};

std::optional<WrongFeatures> first_features(const Evidence& e, const View& bad) {
  const std::size_t last = bad.box.size.size() - 1;
  if (bad.box.global_offset[last] != 0 || bad.box.size[last] != e.wanted.layout.global_shape[last])
    return std::nullopt;
  const at::Tensor rows = (bad.actual - bad.expected).reshape({-1, bad.actual.size(-1)});
  const double near = std::max(
      e.tolerance() * norm_of(bad.expected) / std::sqrt(static_cast<double>(bad.expected.numel())),
      1e-30);
  const at::Tensor wrong = rows.abs().amax(0).gt(4 * near);
  WrongFeatures found{wrong.sum().item<std::int64_t>(), rows.size(1)};
  if (found.count == 0 || !wrong.narrow(0, 0, found.count).all().item<bool>()) return std::nullopt;
  found.is_one_row = rows.size(0) > 1 && norm_of(rows - rows.mean(0, true)) <= 0.05 * norm_of(rows);
  const at::Tensor expected = bad.expected.reshape(rows.sizes()),
                   squares = expected.square().sum(0);
  const at::Tensor factors =
      (rows * expected).sum(0) / at::where(squares.gt(0), squares, at::ones_like(squares));
  found.is_scaled = rows.size(0) > 1 && norm_of(rows - expected * factors) <= 0.05 * norm_of(rows);
  if (found.is_one_row && !multiple_of_parameter(e, rows.mean(0)).empty()) return std::nullopt;
  return found;
}

/// Of a parameter that follows another one in a buffer: the first elements, as many as pad the
/// other one's shards, are wrong.
std::string predecessor_padding(const Evidence& e, const View& bad) {
  if (bad.box.size.size() < 2) return "";
  const auto wrong = first_features(e, bad);
  if (!wrong.has_value()) return "";
  const Record* before = nullptr;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    if (record.key.kind != RecordKind::kParam || stage_of(record.key) != Stage::kParametersRead)
      continue;
    const Record* predecessor = std::exchange(before, &record);
    const std::string& name = record.key.name;
    const bool is_bias = name == e.wanted.key.name + ".bias",
               is_own = is_bias || name == e.wanted.key.name + ".weight";
    if (!is_own || predecessor == nullptr || predecessor->layout.global_shape.empty()) continue;
    const Shape &own = record.layout.global_shape, &shape = predecessor->layout.global_shape;
    const std::int64_t row = own.size() == 2 ? own[1] : 1;
    for (const AxisDegree& axis : e.actual.mesh.axes()) {
      const std::int64_t padded_rows = (shape[0] + axis.degree - 1) / axis.degree * axis.degree;
      const std::int64_t covered =
          std::min((padded_rows - shape[0]) * (numel_of(shape) / shape[0]), numel_of(own));
      if (covered == 0 || (covered + row - 1) / row != wrong->count) continue;
      // What a bias, or a weight by feature, explains whole; rows of a matrix must be some of all.
      if (is_bias           ? !wrong->is_one_row
          : own.size() == 1 ? !wrong->is_scaled
                            : wrong->count == wrong->all)
        continue;
      return fmt::format(
          "gathered parameters: first {} elements of the weight after {} ({}) are wrong "
          "(predecessor padding)",
          covered, predecessor->key.name, name);
    }
  }
  return "";
}

/// Where `part` stands in `whole`, both vectors, beginning anywhere and over an end of either: the
/// offset of part[0]; nothing if nowhere.
struct Overlap {
  std::int64_t offset = 0;          ///< of part[0] in whole; may be below 0
  std::int64_t begin = 0, end = 0;  ///< of what overlaps, in part
};

std::optional<Overlap> find_overlap(const at::Tensor& part, const at::Tensor& whole,
                                    double tolerance) {
  constexpr std::int64_t kLeast = 8;
  const std::int64_t probe = part.abs().argmax().item<std::int64_t>();
  const double value = part[probe].item<double>();
  if (value == 0) return std::nullopt;
  const at::Tensor near =
      (whole - value).abs().le(tolerance * std::abs(value)).nonzero().reshape({-1}).contiguous();
  for (std::int64_t i = 0; i < std::min<std::int64_t>(near.numel(), 64); ++i) {
    const std::int64_t offset = near.const_data_ptr<std::int64_t>()[i] - probe;
    const Overlap overlap{offset, std::max<std::int64_t>(0, -offset),
                          std::min(part.numel(), whole.numel() - offset)};
    const std::int64_t length = overlap.end - overlap.begin;
    if (length < kLeast) continue;
    const at::Tensor mine = part.narrow(0, overlap.begin, length);
    if (norm_of(mine - whole.narrow(0, overlap.begin + offset, length)) <=
        tolerance * norm_of(mine))
      return overlap;
  }
  return std::nullopt;
}

}  // namespace

std::string cause_in_masks(const Evidence& e) {
  const View* bad = e.wanted.key.kind == RecordKind::kMask ? e.first_bad_view() : nullptr;
  if (bad == nullptr || bad->actual.numel() == 0 || bad->actual.min().equal(bad->actual.max()))
    return "";
  const PartStats& own = e.held_by(bad->rank)->record->parts[0];
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    std::vector<int> alike;
    std::set<Shape> places;
    for (const int rank : e.actual.mesh.group_of(bad->rank, axis.axis)) {
      const Held* held = e.held_by(rank);
      if (held == nullptr || held->record->parts.size() != 1) continue;
      const PartStats& part = held->record->parts[0];
      if (part.digest != own.digest || part.box.size != own.box.size ||
          !places.insert(part.box.global_offset).second)
        continue;
      alike.push_back(rank);
    }
    if (alike.size() < 2) continue;
    const Shape &first = *places.begin(), &second = *places.rbegin();
    const bool same_samples = first[0] == second[0],
               is_of_tokens = same_samples && first.size() == 3 && first[1] != second[1];
    return fmt::format("{} use one mask for different {}", e.coordinates_in_words(alike, axis.axis),
                       is_of_tokens   ? "tokens"
                       : same_samples ? "places"
                                      : "samples");
  }
  return "";
}

std::string cause_in_weights_read(const Evidence& e) {
  const View* bad = e.wanted.key.kind == RecordKind::kActivation ? e.first_bad_view() : nullptr;
  if (bad == nullptr) return "";
  const std::string stale = stale_parameters(e, *bad);
  return stale.empty() ? predecessor_padding(e, *bad) : stale;
}

std::string cause_in_other_gradients(const Evidence& e) {
  const View* bad = e.wanted.key.kind == RecordKind::kGrad ? e.first_bad_view() : nullptr;
  if (bad == nullptr || bad->actual.numel() < 8) return "";
  const at::Tensor actual = bad->actual.reshape({-1}), expected = bad->expected.reshape({-1});
  const double tolerance = std::min(e.tolerance(), 1e-2);
  const at::Tensor wrong =
      (actual - expected).abs().gt(tolerance * actual.abs().max()).nonzero().reshape({-1});
  if (wrong.numel() == 0) return "";
  // a smaller buffer covers the beginning only
  const std::int64_t end = wrong[wrong.numel() - 1].item<std::int64_t>() + 1;
  std::int64_t searched = 0;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    const RecordKey& key = record.key;
    if (key.kind != RecordKind::kGrad || key.step != e.wanted.key.step ||
        key.name == e.wanted.key.name)
      continue;
    searched += numel_of(record.layout.global_shape);
    if (searched > kMostSearched) return "";
    const auto overlap = find_overlap(
        actual.narrow(0, 0, end), e.reference.tensor(key).to(at::kDouble).reshape({-1}), tolerance);
    if (!overlap.has_value()) continue;
    return fmt::format("wrong values equal values of {} (from element {} on)", key.name,
                       std::max<std::int64_t>(0, overlap->offset));
  }
  return "";
}

}  // namespace isoshard::detail
