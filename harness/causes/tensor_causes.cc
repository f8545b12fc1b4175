// SPDX-License-Identifier: Apache-2.0
/// Causes of wrong tensors that show beside other tensors of the run.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/causes/run_causes.h"
#include "harness/ids/phrase.h"
#include "harness/trace/parts.h"
#include "harness/trace/stage.h"
#include "harness/verdict/neighbours.h"
#include "harness/verdict/parts/dtypes.h"

namespace isoshard::detail {
namespace {

/// How many times the right step a rank made; nothing if its step is no multiple of it.
std::optional<double> update_factor(const Evidence& e, const View& view) {
  const RecordKey before = record_before(e.wanted.key);
  if (e.reference.find(before) == nullptr) return std::nullopt;
  const Values expected_before =
      e.reference_value(before).cut(view.box.global_offset, view.box.size);
  Values actual_before = expected_before;
  const Held* held = e.held_by(view.rank);
  const Record* own = held == nullptr ? nullptr : held->rank->find(before);
  if (const auto found = own == nullptr ? std::nullopt : e.own_box(*held->rank, *own)) {
    if (found->first.global_offset == view.box.global_offset && found->first.size == view.box.size)
      actual_before = found->second;
  }
  const Values right = view.expected - expected_before, made = view.actual - actual_before;
  const double norm = norm_of(right);
  if (norm == 0) return std::nullopt;
  const double factor = dot(right, made) / (norm * norm);
  if (!(distance(made, factor * right) <= 0.02 * norm_of(made))) return std::nullopt;
  return factor;
}

/// For each coordinate of an axis, which part of a tensor it holds, counted in the order of places.
/// Empty if they hold no parts.
std::vector<int> parts_held(const Evidence& e, const RecordKey& key,
                            const std::vector<int>& group) {
  std::vector<Shape> places;
  for (const int rank : group) {
    const auto trace = std::find_if(e.actual.ranks.begin(), e.actual.ranks.end(),
                                    [&](const RankTrace& t) { return t.rank == rank; });
    const Record* record = trace == e.actual.ranks.end() ? nullptr : trace->find(key);
    if (record == nullptr || record->parts.size() != 1) return {};
    places.push_back(record->parts[0].box.global_offset);
  }
  const std::set<Shape> distinct(places.begin(), places.end());
  if (distinct.size() < 2 || group.size() % distinct.size() != 0) return {};
  std::vector<int> parts;
  for (const Shape& place : places)
    parts.push_back(static_cast<int>(std::distance(distinct.begin(), distinct.find(place))));
  return parts;
}

/// A tensor of the same module, made earlier, whose parts are held out of rank order by just the
/// ranks that are wrong.
Cause parts_out_of_order(const Evidence& e) {
  const auto axis = e.axis_of(e.bad_ranks());
  if (!axis.has_value()) return {};
  std::set<int> bad;
  for (const int rank : e.bad_ranks()) bad.insert(e.actual.mesh.coordinate(rank, *axis));
  const std::vector<int> group = e.actual.mesh.group_of(e.bad_ranks().front(), *axis);
  for (const Record& earlier : e.reference.trace().ranks.at(0).records) {
    if (earlier.order >= e.wanted.order) break;
    const bool sibling = earlier.key.kind == e.wanted.key.kind &&
                         earlier.key.step == e.wanted.key.step &&
                         earlier.key.call == e.wanted.key.call &&
                         parent_of(earlier.key.name) == parent_of(e.wanted.key.name);
    const std::vector<int> parts = sibling ? parts_held(e, earlier.key, group) : std::vector<int>{};
    if (parts.empty()) continue;
    const int count = *std::max_element(parts.begin(), parts.end()) + 1;
    std::set<int> odd;
    std::vector<int> used, expected;
    for (int c = 0; c < static_cast<int>(parts.size()); ++c) {
      const int in_order = c * count / static_cast<int>(parts.size());
      if (parts[static_cast<std::size_t>(c)] == in_order) continue;
      odd.insert(c);
      used.push_back(parts[static_cast<std::size_t>(c)]);
      expected.push_back(in_order);
    }
    if (odd != bad) continue;
    return make_cause(CauseId::kPartsOutOfOrder,
                      {NamedValue::words("where", e.coordinates_in_words(e.bad_ranks(), *axis)),
                       {"axis", name_of(*axis)},
                       {"coordinates", bad},
                       {"parts", used},
                       {"tensor", earlier.key.name},
                       {"expected", expected}});
  }
  return {};
}

/// What a rank should hold of the reference: its boxes, laid side by side as in the rank's own
/// tensor.
Values part_of(const Values& whole, const Record& record) {
  Record local = record;  // in which a part's place is that in the rank's own tensor
  local.dtype = Dtype::kFloat64;
  local.layout.global_shape = record.local_shape;
  std::vector<double> numbers(static_cast<std::size_t>(numel_of(record.local_shape)), 0);
  for (const PartStats& p : record.parts) {
    const Values own = whole.cut(p.box.global_offset, p.box.size).contiguous();
    PartStats place = p;
    place.box.global_offset = p.box.local_offset;
    place_part(place, local, std::as_bytes(own.flat()).data(),
               std::as_writable_bytes(std::span(numbers)).data());
  }
  return {record.local_shape, std::move(numbers)};
}

bool parts_lie_in(const Record& record, const Shape& global_shape) {
  return std::all_of(record.parts.begin(), record.parts.end(),
                     [&](const PartStats& p) { return lies_in(p.box, global_shape); });
}

bool holds_boxes(const Held& h, const Shape& global_shape) {
  const Record& record = *h.record;
  return record.kept && h.rank->arena != nullptr && !is_flat(record.layout) &&
         !is_partial(record.layout) && parts_lie_in(record, global_shape);
}

/// Every wrong rank holds what another coordinate of an axis should hold.
Cause part_of_another(const Evidence& e) {
  const auto axis = e.axis_of(e.bad_ranks());
  if (!axis.has_value() || !e.whole.defined()) return {};
  std::optional<int> source;
  bool is_fused = false;
  for (const int rank : e.bad_ranks()) {
    const Held* bad = e.held_by(rank);
    if (bad == nullptr || !holds_boxes(*bad, e.wanted.layout.global_shape)) return {};
    is_fused = is_fused || bad->record->parts.size() > 1;
    const Values local = Values(bad->rank->tensor(*bad->record));
    const auto right = std::find_if(e.held.begin(), e.held.end(), [&](const Held& other) {
      return other.rank->rank != rank && other.record->local_shape == bad->record->local_shape &&
             parts_lie_in(*other.record, e.wanted.layout.global_shape) &&
             equal(part_of(e.whole, *other.record), local);
    });
    if (right == e.held.end()) return {};
    const int coordinate = e.actual.mesh.coordinate(right->rank->rank, *axis);
    if (source.has_value() && *source != coordinate) return {};
    source = coordinate;
  }
  return make_cause(CauseId::kShardsOfOtherRank,
                    {NamedValue::words("fused", is_fused ? phrase(PhraseId::kFused) : ""),
                     NamedValue::words("where", e.coordinates_in_words(e.bad_ranks(), *axis)),
                     {"axis", name_of(*axis)},
                     {"is_fused", is_fused},
                     {"coordinate", *source}});
}

/// Several sections that should each be cut, cut once: a rank holds its share of the whole as it
/// lies there.
Cause cut_as_one_block(const Evidence& e) {
  const Held* bad = e.held_by(e.bad_ranks().front());
  if (bad == nullptr || !e.whole.defined() || bad->record->parts.size() < 2 ||
      !holds_boxes(*bad, e.wanted.layout.global_shape))
    return {};
  const Shape &local = bad->record->local_shape, &global = e.wanted.layout.global_shape;
  const Values actual = Values(bad->rank->tensor(*bad->record));
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    const std::int64_t coordinate = e.actual.mesh.coordinate(bad->rank->rank, axis.axis);
    for (std::size_t d = 0; axis.degree > 1 && d < global.size() && d < local.size(); ++d) {
      const std::int64_t begin = coordinate * local[d];
      if (local[d] * axis.degree != global[d]) continue;
      if (!equal(e.whole.narrow(static_cast<std::int64_t>(d), begin, local[d]), actual)) continue;
      return make_cause(CauseId::kCutAsOneBlock, {{"axis", name_of(axis.axis)},
                                                  {"coordinate", coordinate},
                                                  {"slices", d == 0 ? "rows" : "columns"},
                                                  {"first", begin},
                                                  {"last", begin + local[d] - 1},
                                                  {"sections", bad->record->parts.size()}});
    }
  }
  return {};
}

/// The same of two parameters that are kept as one, one after the other: every wrong rank holds
/// what lies at its share of the two.
Cause cut_as_one_with(const Evidence& e, const Record& other, Axis axis, bool other_is_first) {
  const std::int64_t degree = e.actual.mesh.degree(axis),
                     own_rows = e.wanted.layout.global_shape[0];
  const std::int64_t other_rows = other.layout.global_shape[0], all = own_rows + other_rows,
                     rows = own_rows / degree;
  const Values partner = e.reference_value(other.key);
  const Values both = other_is_first ? concatenated(std::vector{partner, e.whole})
                                     : concatenated(std::vector{e.whole, partner});
  const auto begin_of = [&](int rank) {
    return e.actual.mesh.coordinate(rank, axis) * (all / degree) +
           (other_is_first ? other_rows / degree : 0);
  };
  for (const int rank : e.bad_ranks()) {
    const Held* bad = e.held_by(rank);
    if (bad == nullptr || !holds_boxes(*bad, e.wanted.layout.global_shape) ||
        bad->record->local_shape[0] != rows)
      return {};
    const Values local = Values(bad->rank->tensor(*bad->record));
    if (begin_of(rank) + rows > all || !equal(both.narrow(0, begin_of(rank), rows), local))
      return {};
  }
  const int rank = e.bad_ranks().front();
  const bool in_first = begin_of(rank) < (other_is_first ? other_rows : own_rows);
  const std::int64_t begin = begin_of(rank) - (in_first         ? 0
                                               : other_is_first ? other_rows
                                                                : own_rows);
  const std::string& holder = in_first == other_is_first ? other.key.name : e.wanted.key.name;
  return make_cause(CauseId::kCutAsOneWithOther,
                    {{"axis", name_of(axis)},
                     {"coordinate", e.actual.mesh.coordinate(rank, axis)},
                     {"first", begin},
                     {"last", begin + rows - 1},
                     {"holder", holder},
                     {"other", other.key.name}});
}

Cause cut_as_one_with_another(const Evidence& e) {
  if (!e.whole.defined() || e.whole.dim() == 0) return {};
  const std::string &name = e.wanted.key.name, block = parent_of(parent_of(name)),
                    kind = name.substr(parent_of(name).size());
  for (const Record& other : e.reference.trace().ranks.at(0).records) {
    if (other.key.kind != RecordKind::kParam || stage_of(other.key) != Stage::kParametersRead ||
        other.key.name == name)
      continue;
    const Shape &shape = other.layout.global_shape, &own = e.wanted.layout.global_shape;
    const bool is_sibling =
        parent_of(parent_of(other.key.name)) == block && other.key.name.ends_with(kind);
    if (!is_sibling || shape.size() != own.size() ||
        !std::equal(shape.begin() + 1, shape.end(), own.begin() + 1))
      continue;
    for (const AxisDegree& axis : e.actual.mesh.axes()) {
      if (axis.degree == 1 || own[0] % axis.degree != 0 || shape[0] % axis.degree != 0) continue;
      for (const bool other_is_first : {false, true}) {
        if (Cause cause = cut_as_one_with(e, other, axis.axis, other_is_first); !cause.empty())
          return cause;
      }
    }
  }
  return {};
}

Cause not_slices(const Evidence& e) {
  const auto axis = e.axis_of(e.bad_ranks());
  if (!axis.has_value()) return {};
  std::vector<int> right;
  for (const Held& h : e.held) {
    if (std::find(e.bad_ranks().begin(), e.bad_ranks().end(), h.rank->rank) == e.bad_ranks().end())
      right.push_back(h.rank->rank);
  }
  // others need not hold it
  const std::string others =
      right.empty()
          ? ""
          : phrase(PhraseId::kOthersAreRight, {{"where", e.coordinates_in_words(right, *axis)}});
  const PhraseId what = e.result.comparison.sharded ? PhraseId::kShards : PhraseId::kWholeValues;
  return make_cause(CauseId::kNotSlices,
                    {NamedValue::words("what", phrase(what)),
                     NamedValue::words("where", e.coordinates_in_words(e.bad_ranks(), *axis)),
                     {"axis", name_of(*axis)},
                     {"ranks", e.bad_ranks()},
                     NamedValue::words("others", others)});
}

/// A step's integer record, and its distinct values among the view's rows.
struct Ids {
  std::string name;
  std::set<std::int64_t> values;
};

/// The step's first integer record whose distinct values in the view's rows hold all of `rows`;
/// none if none does.
std::optional<Ids> ids_that_hold(const Evidence& e, const View& view,
                                 const std::set<std::int64_t>& rows) {
  const std::int64_t begin = view.box.global_offset[0], end = begin + view.box.size[0];
  std::vector<Ids> found;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    if (record.key.kind != RecordKind::kDataId || record.key.step != e.wanted.key.step ||
        is_floating(record.dtype))
      continue;
    auto own = std::ranges::find(found, record.key.name, &Ids::name);
    if (own == found.end()) own = found.insert(found.end(), {record.key.name, {}});
    const Values all = e.reference_value(record.key);
    for (const double value : all.flat()) {
      const auto id = static_cast<std::int64_t>(value);
      if (id >= begin && id < end) own->values.insert(id);
    }
  }
  const auto holds = std::ranges::find_if(
      found, [&](const Ids& ids) { return std::ranges::includes(ids.values, rows); });
  return holds == found.end() ? std::nullopt : std::optional(*holds);
}

/// The step near the tensor's own whose learning rate is the right one times the factor.
std::optional<int> step_of_rate(const Evidence& e, double factor) {
  const auto rate_in = [&](int step) {
    return e.scalar(step, NameRole::kLearningRate).value_or(0.0);
  };
  const double own = rate_in(e.wanted.key.step);
  for (const int away : {-1, 1, -2, 2}) {
    const double other = rate_in(e.wanted.key.step + away);
    if (own > 0 && other > 0 && other != own && is_near(factor, other / own, 0.005))
      return e.wanted.key.step + away;
  }
  return std::nullopt;
}

}  // namespace

Cause cause_in_update(const Evidence& e) {
  if (stage_of(e.wanted.key) != Stage::kParameterAfterStep) return {};
  std::optional<double> common;
  for (const int rank : e.bad_ranks()) {
    const View* view = e.view_of(rank);
    const auto factor = view == nullptr ? std::nullopt : update_factor(e, *view);
    if (!factor.has_value() || is_near(*factor, 1, 0.01)) return {};
    if (common.has_value() && !is_near(*factor, *common, 0.01)) return {};
    common = factor;
  }
  if (!common.has_value()) return {};
  std::string before = phrase(PhraseId::kUpdate);
  NamedValues more;
  if (!e.result.differing_axes.empty()) {
    before =
        phrase(PhraseId::kCopiesDifferOver, {{"axes", names_of(e.result.differing_axes)}}) + before;
    more = {
        NamedValue::words("on_ranks", phrase(PhraseId::kOnTheRanks, {{"ranks", e.bad_ranks()}}))};
  }
  more.push_back(NamedValue::words("before", before));
  more.emplace_back("is_update", true);
  Cause scale = e.scale_cause(*common, more);
  // a factor that is no number of the run may be that of a bias correction
  const bool is_formula = scale.id != CauseId::kScale && scale.id != CauseId::kScaleNearOne;
  if (Cause rule = is_formula ? Cause() : cause_in_rule(e); !rule.empty()) return rule;
  const auto step = step_of_rate(e, *common);
  if (!step.has_value()) return scale;
  more.emplace_back("scale", *common);
  more.emplace_back("step", *step);
  return make_cause(CauseId::kUpdateWithRateOfStep, std::move(more));
}

Cause cause_in_rows(const Evidence& e) {
  const View* bad = e.wanted.key.kind == RecordKind::kGrad ? e.first_bad_view() : nullptr;
  if (bad == nullptr || bad->actual.dim() != 2) return {};
  const auto has_numbers = [](const Values& matrix, std::int64_t row) {
    return matrix.narrow(0, row, 1).any([](double value) { return value != 0; });
  };
  std::set<std::int64_t> rows, missing;
  for (std::int64_t row = 0; row < bad->actual.size(0); ++row) {
    const std::int64_t id = row + bad->box.global_offset[0];
    if (has_numbers(bad->actual, row)) {
      rows.insert(id);
    } else if (has_numbers(bad->expected, row)) {
      missing.insert(id);
    }
  }
  if (missing.empty() || rows.empty()) return {};
  const std::optional<Ids> ids = ids_that_hold(e, *bad, rows);
  if (!ids.has_value()) return {};
  const auto lost =
      std::ranges::count_if(missing, [&](std::int64_t id) { return ids->values.contains(id); });
  if (lost == std::ssize(missing)) {
    // a single row of many may be 0 for any other reason
    if (lost == 1 && ids->values.size() > 4) return {};
    return make_cause(CauseId::kSamplesMissing,
                      {{"num_rows", lost}, {"num_ids", ids->values.size()}, {"record", ids->name}});
  }
  // Not every id need have a gradient: the last token of a sequence predicts nothing.
  if (2 * rows.size() >= ids->values.size())
    return make_cause(CauseId::kInputSideOnly,
                      {{"record", ids->name}, {"num_rows", missing.size()}});
  return {};
}

Cause cause_mixed_dtypes(const Evidence& e) {
  const std::optional<MixedDtypes> mixed = mixed_dtypes(e.held, e.wanted.dtype);
  if (!mixed.has_value()) return {};
  const bool are_floating =
      is_floating(mixed->usual) && std::ranges::all_of(mixed->others, [](const auto& entry) {
        return is_floating(entry.first);
      });
  const Stage stage = stage_of(e.wanted.key);
  std::string guess;
  if (are_floating && stage == Stage::kParametersRead) {
    guess = phrase(PhraseId::kModelCast);
  } else if (are_floating && (stage == Stage::kForward || stage == Stage::kActivationGrad)) {
    guess = phrase(PhraseId::kAutocast);
  }
  std::vector<std::string_view> others;
  for (const auto& [dtype, ranks] : mixed->others) others.push_back(name_of(dtype));
  return make_cause(CauseId::kMixedDtypes, {{"ranks", mixed->odd_ranks()},
                                            {"others", others},
                                            {"usual", name_of(mixed->usual)},
                                            NamedValue::words("dtypes", mixed->words()),
                                            NamedValue::words("guess", guess)});
}

Cause cause_in_dtype(const Evidence& e) {
  const Held* held =
      e.wanted.key.kind == RecordKind::kOptimizer ? e.held_by(e.bad_ranks().front()) : nullptr;
  if (held == nullptr || size_of(held->record->dtype) >= size_of(e.wanted.dtype)) return {};
  const std::string_view actual = name_of(held->record->dtype), declared = name_of(e.wanted.dtype);
  if (stepped_parameter(e.wanted.key).empty())
    return make_cause(CauseId::kStateInOtherDtype,
                      {{"state", e.wanted.key.name}, {"dtype", actual}, {"declared", declared}});
  return make_cause(CauseId::kMastersInOtherDtype, {{"dtype", actual}, {"declared", declared}});
}

Cause cause_in_buffer(const Evidence& e) {
  const View* bad = e.wanted.key.kind == RecordKind::kGrad && e.wanted.key.step > 0
                        ? e.first_bad_view()
                        : nullptr;
  if (bad == nullptr) return {};
  // As the step before left it, which is what this step's forward read.
  const RecordKey read =
      record_before({e.wanted.key.step, RecordKind::kParam, e.wanted.key.name, 0});
  const Record* parameter = e.reference.find(read);
  if (parameter == nullptr || parameter->layout.global_shape != e.wanted.layout.global_shape)
    return {};
  const Values values = e.reference_value(read).cut(bad->box.global_offset, bad->box.size);
  const Values extra = bad->actual - bad->expected;
  const double squares = dot(values, values);
  if (squares == 0) return {};
  const double factor = dot(extra, values) / squares;
  if (!(distance(extra, factor * values) <= 0.1 * norm_of(extra))) return {};
  // one that was 0 at first is a multiple of the earlier gradient
  if (!cause_not_cleared(e).empty()) return {};
  const std::string times =
      is_near(factor, 1, 0.02) ? "" : phrase(PhraseId::kTimesParameter, {{"factor", factor}});
  return make_cause(CauseId::kParameterValuesAdded,
                    {{"factor", factor}, NamedValue::words("times", times)});
}

Cause cause_in_shards(const Evidence& e) {
  if (stage_of(e.wanted.key) != Stage::kParametersRead) return {};
  for (const auto pattern : {part_of_another, cut_as_one_block, cut_as_one_with_another}) {
    if (Cause cause = pattern(e); !cause.empty()) return cause;
  }
  return {};
}

Cause cause_in_places(const Evidence& e) {
  return stage_of(e.wanted.key) == Stage::kParametersRead ? not_slices(e) : Cause();
}

Cause cause_in_order_of_parts(const Evidence& e) {
  return stage_of(e.wanted.key) == Stage::kParametersRead ? Cause() : parts_out_of_order(e);
}

Cause multiple_of_parameter(const Evidence& e, const Values& row) {
  const double size = norm_of(row);
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    const bool fits = record.key.kind == RecordKind::kParam &&
                      record.key.step == e.wanted.key.step &&
                      record.layout.global_shape == Shape{row.numel()} &&
                      stage_of(record.key) == Stage::kParametersRead;
    if (!fits) continue;
    const Values parameter = e.reference_value(record.key);
    const double norm = norm_of(parameter);
    if (norm == 0) continue;
    const double factor = dot(row, parameter) / (norm * norm);
    if (!(distance(row, factor * parameter) <= 0.02 * size)) continue;
    const std::string word = record.key.name.substr(record.key.name.rfind('.') + 1);
    NamedValues values = {
        {"factor", factor}, {"parameter", record.key.name}, NamedValue::words("word", word)};
    if (is_near(factor, -1, 0.02))
      return make_cause(CauseId::kParameterNotAdded, std::move(values));
    std::string_view of_axis;
    for (const AxisDegree& axis : e.actual.mesh.axes()) {
      if (axis.degree > 1 && is_near(factor, axis.degree - 1, 0.02)) of_axis = name_of(axis.axis);
    }
    if (!of_axis.empty()) {
      values.emplace_back("axis", of_axis);
      values.push_back(NamedValue::words("formula", phrase(PhraseId::kOneLessThanAxis, values)));
    }
    return make_cause(CauseId::kParameterAddedTimes, std::move(values));
  }
  return {};
}

}  // namespace isoshard::detail
