// SPDX-License-Identifier: Apache-2.0
/// Causes that lie in what was read: masks drawn alike, parameters of an earlier step, buffers that
/// hold something else.
#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/run_causes.h"
#include "harness/ids/phrase.h"

namespace isoshard::detail {
namespace {

constexpr int kReadInputsTried = 24;
constexpr int kStepsBack = 4;
constexpr std::int64_t kMostSearched = std::int64_t{1} << 24;

/// The parameters of the module whose output diverges, as read in a step: as read at the beginning,
/// or as the step before left them.
struct ModuleParameters {
  Values weight, bias;  ///< undefined if the module has none
};

RecordKey read_in(int step, std::string name) {
  if (step == 0) return {0, RecordKind::kParam, std::move(name), 0};
  return {step - 1, RecordKind::kParam, std::move(name), step == 1 ? 1 : 0};
}

ModuleParameters parameters_read_in(const Evidence& e, int step, const std::string& module) {
  ModuleParameters found;
  for (const auto& [suffix, place] :
       {std::pair{".weight", &found.weight}, std::pair{".bias", &found.bias}}) {
    const RecordKey key = read_in(step, module + suffix);
    if (e.reference.find(key) != nullptr) *place = e.reference_value(key);
  }
  return found;
}

/// The samples and tokens of a whole tensor [batch, sequence, ...] that a view has.
Values rows_of(const Values& whole, const View& view) {
  const Shape &offset = view.box.global_offset, &size = view.box.size;
  return whole.cut({offset[0], offset[1]}, {size[0], size[1]});
}

/// What the view should hold if the module had read `old` instead of `now`: every way in which a
/// module of these shapes may use them. Inputs are the nearest activations before it, and integer
/// data.
std::vector<Values> outputs_with(const Evidence& e, const View& view, const ModuleParameters& now,
                                 const ModuleParameters& old) {
  std::vector<Values> outputs;
  const auto last = static_cast<std::size_t>(view.box.size.size() - 1);
  const std::int64_t begin = view.box.global_offset[last], features = view.box.size[last];
  const auto own = [&](const Values& vector) { return vector.narrow(0, begin, features); };
  const bool fits_bias =
      now.bias.defined() && now.bias.dim() == 1 && now.bias.size(0) >= begin + features;
  const Values shift = fits_bias ? own(old.bias) - own(now.bias) : Values::zeros({features});
  if (!now.weight.defined()) return outputs;
  if (now.weight.dim() == 1) {
    if (now.weight.size(0) < begin + features) return outputs;
    const Values bias = fits_bias ? own(now.bias) : Values::zeros({features});
    outputs.push_back((view.expected - bias) / own(now.weight) * own(old.weight) + bias + shift);
    return outputs;
  }
  if (now.weight.dim() != 2 || view.box.size.size() < 2) return outputs;
  const Values change = old.weight - now.weight;
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
  before.resize(std::min<std::size_t>(before.size(), kReadInputsTried));
  for (const RecordKey& key : before) {
    const HostTensor recorded = e.reference.tensor(key);
    const Values input = rows_of(Values(recorded), view);
    if (!is_floating(recorded.dtype)) {
      const bool is_lookup = input.dim() == 2 && change.size(1) >= begin + features &&
                             input.min() >= 0 && input.max() < static_cast<double>(change.size(0));
      if (is_lookup) {
        const Values looked_up = change.narrow(1, begin, features).take(whole_numbers(input));
        outputs.push_back(view.expected + looked_up.reshape(view.box.size));
      }
      continue;
    }
    if (input.dim() < 3) continue;
    const Values x = input.reshape({input.size(0) * input.size(1), -1});
    const auto add = [&](const Values& weight) {
      const Values output = product(x, weight);
      if (output.numel() == view.expected.numel())
        outputs.push_back(view.expected + output.reshape(view.box.size) + shift);
    };
    if (x.size(1) == change.size(1) && change.size(0) >= begin + features)
      add(change.narrow(0, begin, features).transposed());
    if (x.size(1) == change.size(0) && change.size(1) >= begin + features)
      add(change.narrow(1, begin, features));
  }
  return outputs;
}

Cause stale_parameters(const Evidence& e, const View& bad) {
  if (bad.box.size.empty()) return {};
  const int step = e.wanted.key.step;
  const std::string& name = e.wanted.key.name;
  const ModuleParameters now = parameters_read_in(e, step, name);
  const double error = distance(bad.actual, bad.expected);
  for (int back = 1; back <= std::min(step, kStepsBack); ++back) {
    for (const Values& output :
         outputs_with(e, bad, now, parameters_read_in(e, step - back, name))) {
      if (output.shape() != bad.actual.shape() || !e.explains(output, bad.actual, error)) continue;
      const auto axis = e.axis_of(e.bad_ranks());
      const std::string where = axis.has_value()
                                    ? e.coordinates_in_words(e.bad_ranks(), *axis)
                                    : phrase(PhraseId::kRanks, {{"ranks", e.bad_ranks()}});
      return make_cause(CauseId::kStaleParametersRead, {{"step", step},
                                                        {"parameter", name + ".weight"},
                                                        {"steps", back},
                                                        {"ranks", e.bad_ranks()},
                                                        NamedValue::words("where", where)});
    }
  }
  return {};
}

/// Other modules whose parameters have the shapes of this one's: those of other layers first.
std::vector<std::string> modules_alike(const Evidence& e, const ModuleParameters& now) {
  const std::string &own = e.wanted.key.name, kind = own.substr(parent_of(own).size());
  std::vector<std::string> of_kind, others;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    const std::string& name = record.key.name;
    if (record.key.kind != RecordKind::kParam || stage_of(record.key) != Stage::kParametersRead ||
        !name.ends_with(".weight") || record.layout.global_shape != now.weight.shape())
      continue;
    const std::string module = parent_of(name);
    if (module != own) (module.ends_with(kind) ? of_kind : others).push_back(module);
  }
  of_kind.insert(of_kind.end(), others.begin(), others.end());
  constexpr std::size_t kTried = 16;
  of_kind.resize(std::min(of_kind.size(), kTried));
  return of_kind;
}

/// A layer that is computed with the parameters of another one.
Cause parameters_of_another(const Evidence& e, const View& bad) {
  if (bad.box.size.empty() || !is_telling(bad.actual)) return {};
  const int step = e.wanted.key.step;
  const ModuleParameters now = parameters_read_in(e, step, e.wanted.key.name);
  if (!now.weight.defined()) return {};
  // One product for each of up to 16 modules and 24 inputs: what takes minutes is not tried.
  constexpr double kMostProducts = 1e8;
  const double of_one = static_cast<double>(now.weight.numel()) *
                        (now.weight.dim() < 2 ? 1
                                              : static_cast<double>(bad.actual.numel()) /
                                                    static_cast<double>(bad.box.size.back()));
  if (of_one > kMostProducts) return {};
  for (const std::string& module : modules_alike(e, now)) {
    const ModuleParameters other = parameters_read_in(e, step, module);
    if (!other.weight.defined() || other.bias.defined() != now.bias.defined()) continue;
    for (const Values& output : outputs_with(e, bad, now, other)) {
      if (output.shape() != bad.actual.shape() || !e.explains_each(output, bad)) continue;
      return make_cause(CauseId::kParametersOfAnother,
                        {{"read", module + ".weight"},
                         {"parameter", e.wanted.key.name + ".weight"},
                         e.on_bad_ranks()});
    }
  }
  return {};
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
  const Values rows = (bad.actual - bad.expected).rows();
  const double near = std::max(
      e.tolerance() * norm_of(bad.expected) / std::sqrt(static_cast<double>(bad.expected.numel())),
      1e-30);
  WrongFeatures found{0, rows.size(1)};
  std::int64_t first_right = rows.size(1);
  for (std::int64_t feature = rows.size(1); feature-- > 0;) {
    const bool is_wrong = rows.narrow(1, feature, 1).any([near](double difference) {
      return std::fabs(difference) > 4 * near;
    });
    if (is_wrong) ++found.count;
    if (!is_wrong) first_right = feature;
  }
  if (found.count == 0 || first_right < found.count) return std::nullopt;
  found.is_one_row = rows.size(0) > 1 && distance(rows, rows.mean(0)) <= 0.05 * norm_of(rows);
  const Values expected = bad.expected.reshape(rows.shape());
  const Values squares =
      (expected * expected).sum(0).map([](double square) { return square > 0 ? square : 1; });
  const Values factors = (rows * expected).sum(0) / squares;
  found.is_scaled = rows.size(0) > 1 && distance(rows, expected * factors) <= 0.05 * norm_of(rows);
  if (found.is_one_row && !multiple_of_parameter(e, rows.mean(0)).empty()) return std::nullopt;
  return found;
}

/// Of a parameter that follows another one in a buffer: the first elements, as many as pad the
/// other one's shards, are wrong.
Cause predecessor_padding(const Evidence& e, const View& bad) {
  if (bad.box.size.size() < 2) return {};
  const auto wrong = first_features(e, bad);
  if (!wrong.has_value()) return {};
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
      return make_cause(
          CauseId::kPredecessorPadding,
          {{"elements", covered}, {"predecessor", predecessor->key.name}, {"parameter", name}});
    }
  }
  return {};
}

/// Where `part` stands in `whole`, both vectors, beginning anywhere and over an end of either: the
/// offset of part[0]; nothing if nowhere.
struct Overlap {
  std::int64_t offset = 0;          ///< of part[0] in whole; may be below 0
  std::int64_t begin = 0, end = 0;  ///< of what overlaps, in part
};

std::optional<Overlap> find_overlap(const Values& part, const Values& whole, double tolerance) {
  constexpr std::int64_t kLeast = 8;
  constexpr int kPlacesTried = 64;
  const Values own = part.contiguous(), searched = whole.contiguous();
  const std::span<const double> numbers = own.flat(), places = searched.flat();
  const auto largest = std::ranges::max_element(
      numbers, [](double a, double b) { return std::fabs(a) < std::fabs(b); });
  const double value = *largest;
  if (value == 0) return std::nullopt;
  const std::int64_t probe = largest - numbers.begin();
  int tried = 0;
  for (std::size_t i = 0; i < places.size() && tried < kPlacesTried; ++i) {
    if (!(std::fabs(places[i] - value) <= tolerance * std::fabs(value))) continue;
    ++tried;
    const std::int64_t offset = static_cast<std::int64_t>(i) - probe;
    const Overlap overlap{offset, std::max<std::int64_t>(0, -offset),
                          std::min(part.numel(), whole.numel() - offset)};
    const std::int64_t length = overlap.end - overlap.begin;
    if (length < kLeast) continue;
    const Values mine = part.narrow(0, overlap.begin, length);
    if (distance(mine, whole.narrow(0, overlap.begin + offset, length)) <=
        tolerance * norm_of(mine))
      return overlap;
  }
  return std::nullopt;
}

/// What a rank should hold of another record: its own box, where that is one.
Values held_of(const Evidence& e, int rank, const RecordKey& key) {
  const Values whole = e.reference_value(key);
  const auto trace = std::ranges::find(e.actual.ranks, rank, &RankTrace::rank);
  const Record* const own = trace == e.actual.ranks.end() ? nullptr : trace->find(key);
  const bool is_box = own != nullptr && own->parts.size() == 1 && !is_flat(own->layout) &&
                      lies_in(own->parts[0].box, whole.shape());
  return is_box ? whole.cut(own->parts[0].box.global_offset, own->parts[0].box.size).contiguous()
                : whole;
}

}  // namespace

Cause cause_in_masks(const Evidence& e) {
  const View* bad = e.wanted.key.kind == RecordKind::kMask ? e.first_bad_view() : nullptr;
  if (bad == nullptr || bad->actual.numel() == 0 || bad->actual.min() == bad->actual.max())
    return {};
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
    const CauseId id = is_of_tokens   ? CauseId::kOneMaskForTokens
                       : same_samples ? CauseId::kOneMaskForPlaces
                                      : CauseId::kOneMaskForSamples;
    const std::string where = e.coordinates_in_words(alike, axis.axis);
    return make_cause(id, {{"axis", name_of(axis.axis)},
                           {"sharing_ranks", alike},
                           NamedValue::words("where", where)});
  }
  return {};
}

Cause cause_in_weights_read(const Evidence& e) {
  const View* bad = e.wanted.key.kind == RecordKind::kActivation ? e.first_bad_view() : nullptr;
  if (bad == nullptr) return {};
  for (const auto pattern : {stale_parameters, parameters_of_another, predecessor_padding}) {
    if (Cause cause = pattern(e, *bad); !cause.empty()) return cause;
  }
  return {};
}

Cause cause_other_tensor(const Evidence& e) {
  const std::vector<const View*> bad = e.bad_views();
  const RecordKey& key = e.wanted.key;
  // weights as read have causes of their own (cause_in_shards, cause_in_places)
  if (bad.empty() || e.whole.dim() == 0 || stage_of(key) == Stage::kParametersRead) return {};
  std::int64_t searched = 0;
  std::string found;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    const RecordKey& other = record.key;
    if (other.kind != key.kind || other.step != key.step || other.call != key.call ||
        other.name == key.name || stage_of(other) != stage_of(key) ||
        record.layout.global_shape != e.wanted.layout.global_shape)
      continue;
    searched += numel_of(record.layout.global_shape);
    if (searched > kMostSearched) return {};
    const Values values = e.reference_value(other) / record.grad_scale;
    const bool fits = std::ranges::all_of(bad, [&](const View* view) {
      const Values own = values.cut(view->box.global_offset, view->box.size);
      return is_telling(own) && e.explains_each(own, *view);
    });
    // of several that are equal the nearest: of the same module, else the first
    const bool is_sibling = parent_of(other.name) == parent_of(key.name);
    if (fits && (found.empty() || is_sibling)) found = other.name;
  }
  if (found.empty()) return {};
  const bool is_gradient = key.kind == RecordKind::kActivationGrad;
  return make_cause(
      is_gradient ? CauseId::kGradientOfOtherActivation : CauseId::kValuesOfOtherTensor,
      {{"other", found}, e.on_bad_ranks()});
}

Cause cause_in_other_gradients(const Evidence& e) {
  const Stage stage = stage_of(e.wanted.key);
  const bool is_searched =
      e.wanted.key.kind == RecordKind::kGrad || stage == Stage::kParameterAfterStep;
  const View* bad = is_searched ? e.first_bad_view() : nullptr;
  if (bad == nullptr || bad->actual.numel() < 8) return {};
  const Values actual = bad->actual.flattened();
  const Values difference = (bad->actual - bad->expected).flattened();
  const double tolerance = std::min(e.tolerance(), 1e-2);
  const double allowed = tolerance * std::max(actual.max(), -actual.min());
  // a smaller buffer covers the beginning only
  std::int64_t end = difference.numel();
  while (end > 0 && !(std::fabs(difference.flat()[static_cast<std::size_t>(end - 1)]) > allowed))
    --end;
  if (end == 0) return {};
  std::int64_t searched = 0;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    const RecordKey& key = record.key;
    const bool is_alike = stage == Stage::kParameterAfterStep
                              ? stage_of(key) == stage && key.call == e.wanted.key.call
                              : stage_of(key) == Stage::kParameterGrad;
    if (!is_alike || is_gradient_besides(key) || key.step != e.wanted.key.step ||
        key.name == e.wanted.key.name || key.name == parsed(e.wanted.key).base)
      continue;
    searched += numel_of(record.layout.global_shape);
    if (searched > kMostSearched) return {};
    const auto overlap =
        find_overlap(actual.narrow(0, 0, end), held_of(e, bad->rank, key).flattened(), tolerance);
    if (!overlap.has_value()) continue;
    // weights of norms may all be alike
    if (!is_telling(actual.narrow(0, overlap->begin, overlap->end - overlap->begin))) continue;
    return make_cause(
        CauseId::kWrongValuesOfOtherTensor,
        {{"other", key.name}, {"element", std::max<std::int64_t>(0, overlap->offset)}});
  }
  return {};
}

}  // namespace isoshard::detail
