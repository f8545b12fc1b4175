// SPDX-License-Identifier: Apache-2.0
/// Sums over micro-batches that lose bits on the way.
///
/// The sum that a rank has after each micro-batch is recorded as it is then. What is rounded before
/// the next micro-batch is added shows in the next record alone, and there it is off by just what
/// the rounding takes: that can be made again from the record before, bit by bit. Ranks may hold
/// summands of their own samples, of which the reference has the sum, so everything is added up
/// over them.
#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/run_causes.h"
#include "harness/trace/clipped.h"
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

}  // namespace

std::string cause_rounded_between(const Evidence& e) {
  if (e.wanted.key.kind != RecordKind::kGrad || !e.whole.defined() || e.whole.numel() == 0)
    return "";
  const auto final = final_gradient_of(e.wanted.key);
  const int sums = final.has_value() ? e.wanted.key.call : e.num_micro_batches() - 1;
  RecordKey sum = e.wanted.key;
  if (!final.has_value()) sum.name += ".micro_batch";
  if (sums < 1) return "";
  const Values actual = put_together(e, e.wanted.key, [](double value) { return value; });
  if (!actual.defined()) return "";
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
    if (!lost.defined()) return "";
    // a sum that has few bits loses nothing
    if (!is_telling(lost) || !e.explains_each(e.whole + lost, seen)) continue;
    return fmt::format(
        "the sum of micro-batches is rounded to {} before the next one is added: it is off by what "
        "that takes from the sum{} after micro-batch{} {}",
        name, sums == 1 ? "" : "s", sums == 1 ? "" : "es",
        sums == 1 ? std::string("0") : fmt::format("0..{}", sums - 1));
  }
  return "";
}

}  // namespace isoshard::detail
