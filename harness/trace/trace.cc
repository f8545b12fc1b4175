// SPDX-License-Identifier: Apache-2.0
/// Putting the global tensor together from the ranks' kept parts.
#include "harness/trace/trace.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "harness/trace/numbers.h"
#include "harness/trace/parts.h"

namespace isoshard {
namespace {

/// Where a part lies, and which addend of a partial sum it is: equal places are replicas of each
/// other.
using Place = std::tuple<Shape, Shape, std::int64_t, std::int64_t, std::vector<int>>;

std::vector<int> partial_coordinates(const Layout& layout, const MeshShape& mesh, int rank) {
  std::vector<int> coordinates;
  for (const Placement& placement : layout.placements) {
    if (placement.kind == Placement::Kind::kPartial)
      coordinates.push_back(mesh.coordinate(rank, placement.axis));
  }
  return coordinates;
}

double partial_divisor(const Layout& layout, const MeshShape& mesh) {
  double divisor = 1;
  for (const Placement& placement : layout.placements) {
    if (placement.kind == Placement::Kind::kPartial && placement.reduction == Reduction::kAvg)
      divisor *= mesh.degree(placement.axis);
  }
  return divisor;
}

class Assembly {
 public:
  /// `has_its_scale`: every part is one of a record with this grad_scale.
  Assembly(const MeshShape& mesh, const Record& first, double grad_scale, bool has_its_scale)
      : mesh_(mesh),
        first_(first),
        grad_scale_(grad_scale),
        in_fp64_(is_partial(first.layout) || !has_its_scale),
        is_maximum_(is_maximum(first.layout)),
        dtype_(in_fp64_ ? Dtype::kFloat64 : first.dtype),
        global_(static_cast<std::size_t>(numel_of(first.layout.global_shape)) * size_of(dtype_)) {
    if (!is_maximum_) return;
    auto* const numbers = reinterpret_cast<double*>(global_.data());
    std::fill_n(numbers, global_.size() / sizeof(double), -HUGE_VAL);
  }

  void add(const RankTrace& rank, const Record& record) {
    if (record.layout.global_shape != first_.layout.global_shape ||
        (record.dtype != first_.dtype && numel_of(record.local_shape) > 0)) {
      throw MeshError(
          fmt::format("{}: rank {} must have the global shape [{}] and the dtype {}, as the first "
                      "rank has, got [{}] and {}",
                      describe(record.key), rank.rank, fmt::join(first_.layout.global_shape, ", "),
                      name_of(first_.dtype), fmt::join(record.layout.global_shape, ", "),
                      name_of(record.dtype)));
    }
    const bool flat = is_flat(record.layout);
    HostTensor local;
    std::vector<double> divided;
    const std::byte* own = nullptr;
    Record widened = record;
    if (in_fp64_) widened.dtype = Dtype::kFloat64;
    for (PartStats& part : parts_of(record, mesh_, rank.rank)) {
      if (numel_of(part, flat) == 0) continue;
      if (own == nullptr) {
        local = rank.tensor(record);
        own = local.bytes.data();
        if (in_fp64_) {
          divided = numbers_of(local);
          if (record.grad_scale != grad_scale_) {
            for (double& number : divided) number = number * grad_scale_ / record.grad_scale;
          }
          own = std::as_bytes(std::span(divided)).data();
        }
      }
      (flat ? any_flat_ : any_box_) = true;
      boxes_.push_back(part.box);
      ranges_.push_back(part.range);
      Place place{part.box.global_offset, part.box.size, part.range.global_begin, part.range.count,
                  partial_coordinates(record.layout, mesh_, rank.rank)};
      if (!seen_.insert(std::move(place)).second) continue;
      std::vector<std::byte> scratch;
      const std::byte* bytes = packed(widened, part, own, scratch);
      if (is_partial(record.layout)) {
        add_part(part, widened, bytes);
      } else {
        place_part(part, widened, bytes, global_.data());
      }
    }
  }

  HostTensor finish() {
    if (any_flat_ && any_box_)
      throw MeshError(
          fmt::format("{}: some ranks give boxes and some flat ranges", describe(first_.key)));
    const std::string problem = any_flat_ ? tiling_problem(first_.layout.global_shape, ranges_)
                                          : tiling_problem(first_.layout.global_shape, boxes_);
    if (!problem.empty()) throw MeshError(fmt::format("{}: {}", describe(first_.key), problem));
    const Shape& shape = first_.layout.global_shape;
    if (in_fp64_) {
      std::vector<double> numbers = numbers_of({dtype_, shape, global_});
      const double divisor = partial_divisor(first_.layout, mesh_);
      for (double& number : numbers) number /= divisor;
      global_ = bytes_of(numbers, first_.dtype);
    }
    const auto owner = std::make_shared<const std::vector<std::byte>>(std::move(global_));
    return {first_.dtype, shape, *owner, owner};
  }

 private:
  /// Of a partial sum or maximum in fp64; NaNs stay.
  void add_part(const PartStats& part, const Record& record, const std::byte* bytes) {
    const auto* const from = reinterpret_cast<const double*>(bytes);
    auto* const to = reinterpret_cast<double*>(global_.data());
    for_each_run(part, record, [&](std::int64_t position, std::int64_t done, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) {
        double &whole = to[position + i], own = from[done + i];
        if (!is_maximum_) {
          whole += own;
        } else if (!(own <= whole) && !std::isnan(whole)) {
          whole = own;
        }
      }
    });
  }

  const MeshShape& mesh_;
  const Record& first_;
  double grad_scale_;  ///< of the result
  bool in_fp64_;
  bool is_maximum_;
  Dtype dtype_;  ///< of global_
  bool any_flat_ = false, any_box_ = false;
  std::vector<std::byte> global_;
  std::set<Place> seen_;
  std::vector<Box> boxes_;
  std::vector<FlatRange> ranges_;
};

}  // namespace

HostTensor Trace::assemble(const RecordKey& key, double grad_scale) const {
  const bool has_its_scale = std::all_of(ranks.begin(), ranks.end(), [&](const RankTrace& rank) {
    const Record* const record = rank.find(key);
    return record == nullptr || record->grad_scale == grad_scale;
  });
  std::vector<std::pair<const RankTrace*, const Record*>> held;
  for (const RankTrace& rank : ranks) {
    if (const Record* const record = rank.find(key)) held.emplace_back(&rank, record);
  }
  if (held.empty()) throw VacuousError(fmt::format("no rank recorded {}", describe(key)));
  const auto first = std::ranges::find_if(held, [](const auto& entry) {
    return numel_of(entry.second->local_shape) > 0;  // an empty shard may be of any dtype
  });
  Assembly assembly(mesh, first == held.end() ? *held.front().second : *first->second, grad_scale,
                    has_its_scale);
  for (const auto& [rank, record] : held) assembly.add(*rank, *record);
  return assembly.finish();
}

}  // namespace isoshard
