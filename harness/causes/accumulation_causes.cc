// SPDX-License-Identifier: Apache-2.0
/// Sums over micro-batches that lose bits on the way, and parts of ranks that are not added.
///
/// The sum that a rank has after each micro-batch is recorded as it is then. What is rounded before
/// the next micro-batch is added shows in the next record alone, and there it is off by just what
/// the rounding takes: that can be made again from the record before, bit by bit. Ranks may hold
/// summands of their own samples, of which the reference has the sum, so everything is added up
/// over them.
#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/causes/run_causes.h"
#include "harness/trace/parts.h"

namespace isoshard::detail {
namespace {

/// A dtype by the bits of its significand, the leading one counted.
struct CoarserSum {
  int bits;
  const char* name;
};
constexpr CoarserSum kCoarserSums[] = {{8, "bf16"}, {11, "fp16 or TF32"}, {24, "fp32"}};

/// Which summand of a sum over ranks a rank holds, and how much of it counts.
struct ShareOfSum {
  std::vector<int> place;
  double share = 1;
};

std::optional<ShareOfSum> share_of(const Layout& layout, const MeshShape& mesh, int rank) {
  ShareOfSum summand{.place = summand_of(layout, mesh, rank)};
  for (const Placement& placement : layout.placements) {
    if (placement.kind != Placement::Kind::kPartial) continue;
    if (placement.reduction == Reduction::kAvg) {
      summand.share /= mesh.degree(placement.axis);
    } else if (placement.reduction != Reduction::kSum) {
      return std::nullopt;
    }
  }
  return summand;
}

/// A part of what a rank has recorded. What was not kept is right; of a summand that is not known.
Values recorded_part(const Evidence& e, const RankTrace& rank, const Record& record,
                     const PartStats& part) {
  if (record.kept && rank.arena != nullptr) {
    const Values own(rank.tensor(record));
    return is_flat(record.layout)
               ? own.flattened().narrow(0, part.range.local_begin, part.range.count)
               : own.cut(part.box.local_offset, part.box.size);
  }
  const Record* const right = e.reference.find(record.key);
  if (right == nullptr || is_partial(record.layout)) return {};
  const Values whole = (record.grad_scale / right->grad_scale) * e.reference_value(record.key);
  return is_flat(record.layout)
             ? whole.flattened().narrow(0, part.range.global_begin, part.range.count)
             : whole.cut(part.box.global_offset, part.box.size);
}

/// A record put together from what all ranks hold, each number replaced by what `made` makes of it
/// as it was recorded. Undefined if something is missing.
Values put_together(const Evidence& e, const RecordKey& key,
                    const std::function<double(double)>& made) {
  const Shape& shape = e.wanted.layout.global_shape;
  std::vector<double> numbers(static_cast<std::size_t>(numel_of(shape)), 0);
  std::set<std::pair<Shape, std::vector<int>>> seen;  // copies count once
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* const record = rank.find(key);
    if (record == nullptr) continue;
    const bool is_flat_record = is_flat(record->layout);
    const auto summand = share_of(record->layout, e.actual.mesh, rank.rank);
    if (!summand.has_value() || record->layout.global_shape != shape) return {};
    for (const PartStats& part : record->parts) {
      if (!is_flat_record && !lies_in(part.box, shape)) return {};
      if (!seen.emplace(place_of(part, is_flat_record), summand->place).second) continue;
      const Values own = recorded_part(e, rank, *record, part).contiguous();
      if (!own.defined()) return {};
      const double scale = summand->share / record->grad_scale;
      for_each_run(part, *record, [&](std::int64_t global, std::int64_t packed, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i)
          numbers.at(static_cast<std::size_t>(global + i)) +=
              scale * made(own.flat()[static_cast<std::size_t>(packed + i)]);
      });
    }
  }
  return seen.empty() ? Values() : Values(shape, std::move(numbers));
}

/// What tokens and heads add to the gradient of a vector: dy, or for a weight dy times what is
/// scaled. Undefined if the shapes do not fit.
Values summand_in(const Values& dy, const Values& scaled, std::int64_t size) {
  const Values own = scaled.defined() ? dy * scaled : dy;
  return own.size(-1) == size ? own.rows().sum(0) : Values();
}

/// The boxes of a module's output that ranks of a coordinate hold, each once.
std::set<std::pair<Shape, Shape>> boxes_of_coordinate(const Evidence& e, const RecordKey& key,
                                                      Axis axis, int coordinate) {
  std::set<std::pair<Shape, Shape>> boxes;
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* const record = rank.find(key);
    if (record == nullptr || is_flat(record->layout) ||
        e.actual.mesh.coordinate(rank.rank, axis) != coordinate)
      continue;
    for (const PartStats& part : record->parts) {
      if (lies_in(part.box, record->layout.global_shape))
        boxes.emplace(part.box.global_offset, part.box.size);
    }
  }
  return boxes;
}

/// By coordinate of the axis; empty if the axis does not share the module's outputs out, or these
/// do not give the reference's gradient.
std::vector<Values> parts_along(const Evidence& e, Axis axis, const std::string& module,
                                bool is_bias) {
  const auto value = [&](RecordKind kind, const std::string& name, int call) -> Values {
    const Record* const record = e.reference.find({e.wanted.key.step, kind, name, call});
    return record == nullptr ? Values() : e.reference_value(record->key) / record->grad_scale;
  };
  const Values weight = is_bias ? Values() : e.parameter_read(module + ".weight"),
               bias = is_bias ? Values() : e.parameter_read(module + ".bias");
  const std::int64_t size = e.whole.size(0);
  if (!is_bias && (!weight.defined() || weight.any([](double w) { return w == 0; }))) return {};
  std::vector<Values> parts(static_cast<std::size_t>(e.actual.mesh.degree(axis)),
                            Values::zeros({size}));
  for (int m = 0; m < e.num_micro_batches(); ++m) {
    const RecordKey key{e.wanted.key.step, RecordKind::kActivation, module, m};
    const Values y = value(RecordKind::kActivation, module, m),
                 dy = value(RecordKind::kActivationGrad, module, m);
    if (!y.defined() || !dy.defined() || y.shape() != dy.shape() || y.dim() < 2) return {};
    std::set<std::pair<Shape, Shape>> all;
    std::size_t count = 0;
    for (std::size_t c = 0; c < parts.size(); ++c) {
      const auto boxes = boxes_of_coordinate(e, key, axis, static_cast<int>(c));
      for (const auto& [offset, extent] : boxes) {
        if (offset.size() != y.shape().size()) return {};
        const Values own = y.cut(offset, extent), own_dy = dy.cut(offset, extent);
        const Values scaled = is_bias                ? Values()
                              : own.size(-1) != size ? Values()
                              : bias.defined()       ? (own - bias) / weight
                                                     : own / weight;
        if (!is_bias && !scaled.defined()) return {};
        const Values summand = summand_in(own_dy, scaled, size);
        if (!summand.defined()) return {};
        parts[c] = parts[c] + summand;
      }
      count += boxes.size();
      all.insert(boxes.begin(), boxes.end());
    }
    // what all coordinates hold is no part
    if (all.size() != count || count < 2) return {};
  }
  Values sum = Values::zeros({size});
  for (const Values& part : parts) sum = sum + part;
  const bool is_right = distance(sum, e.whole) <= std::max(e.tolerance(), 1e-3) * norm_of(e.whole);
  return is_right ? parts : std::vector<Values>();
}

Values elementwise(const std::vector<Values>& parts, bool is_largest) {
  std::vector<double> numbers(parts.front().flat().begin(), parts.front().flat().end());
  for (const Values& part : parts) {
    for (std::size_t i = 0; i < numbers.size(); ++i)
      numbers[i] =
          is_largest ? std::max(numbers[i], part.flat()[i]) : std::min(numbers[i], part.flat()[i]);
  }
  return {parts.front().shape(), std::move(numbers)};
}

}  // namespace

Cause cause_largest_part(const Evidence& e) {
  const std::string& name = e.wanted.key.name;
  const std::vector<const View*> bad = e.bad_views();
  if (bad.empty() || e.whole.dim() != 1 || role_of(e.wanted.key) == NameRole::kMicroBatch ||
      name.rfind('.') == std::string::npos)
    return {};
  for (const AxisDegree& axis : e.actual.mesh.axes()) {
    if (axis.degree == 1) continue;
    const std::vector<Values> parts =
        parts_along(e, axis.axis, name.substr(0, name.rfind('.')), name.ends_with(".bias"));
    if (parts.empty()) continue;
    for (const bool is_largest : {true, false}) {
      const Values extreme = elementwise(parts, is_largest);
      // a mean over ranks is of numbers that are as many times larger
      for (const double factor : {1.0, static_cast<double>(axis.degree)}) {
        const bool fits = std::ranges::all_of(bad, [&](const View* view) {
          return e.explains_each(factor * extreme.cut(view->box.global_offset, view->box.size),
                                 *view);
        });
        if (fits)
          return make_cause(is_largest ? CauseId::kLargestPart : CauseId::kSmallestPart,
                            {{"num_ranks", axis.degree},
                             {"axis", name_of(axis.axis)},
                             {"reduction", factor == 1 ? "sum" : "mean"},
                             e.on_bad_ranks()});
      }
    }
  }
  return {};
}

Cause cause_rounded_between(const Evidence& e) {
  if (e.wanted.key.kind != RecordKind::kGrad || !e.whole.defined() || e.whole.numel() == 0)
    return {};
  const bool is_between = role_of(e.wanted.key) == NameRole::kMicroBatch;
  const int sums = is_between ? e.wanted.key.call : e.num_micro_batches() - 1;
  RecordKey sum = e.wanted.key;
  if (!is_between) sum.name = to_string({sum.name, NameRole::kMicroBatch});
  if (sums < 1) return {};
  const Values actual = put_together(e, e.wanted.key, [](double value) { return value; });
  if (!actual.defined()) return {};
  const Shape& shape = e.whole.shape();
  const View seen{e.bad_ranks().front(),
                  {Shape(shape.size(), 0), Shape(shape.size(), 0), shape},
                  actual,
                  e.whole};
  for (const auto& [bits, name] : kCoarserSums) {
    Values lost = Values::zeros(shape);
    for (sum.call = 0; lost.defined() && sum.call < sums; ++sum.call) {
      const Values own = put_together(
          e, sum, [&, bits = bits](double value) { return rounded_to(value, bits) - value; });
      lost = own.defined() ? lost + own : Values();
    }
    if (!lost.defined()) return {};
    // a sum that has few bits loses nothing
    if (!is_telling(lost) || !e.explains_each(e.whole + lost, seen)) continue;
    return make_cause(
        CauseId::kSumRoundedBetween,
        {{"dtype", name},
         {"bits", bits},
         {"sums", sums},
         NamedValue::words("after",
                           sums == 1 ? "0" : phrase(PhraseId::kFromZeroTo, {{"last", sums - 1}}))});
  }
  return {};
}

}  // namespace isoshard::detail
