// SPDX-License-Identifier: Apache-2.0
/// Putting the global tensor together from the ranks' kept parts.
#include "harness/trace/trace.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <map>
#include <set>
#include <tuple>

#include "core/base/error.h"
#include "core/comm/tensor.h"
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
  Assembly(const MeshShape& mesh, const Record& first)
      : mesh_(mesh), first_(first), in_fp64_(is_partial(first.layout) || first.grad_scale != 1.0) {
    const auto dtype = in_fp64_ ? at::kDouble : scalar_type_of(first.dtype);
    global_ = at::zeros(first.layout.global_shape, at::TensorOptions().dtype(dtype));
  }

  void add(const RankTrace& rank, const Record& record) {
    if (record.layout.global_shape != first_.layout.global_shape || record.dtype != first_.dtype) {
      throw MeshError(
          fmt::format("{}: rank {} has another global shape or dtype than the first rank",
                      describe(record.key), rank.rank));
    }
    const bool flat = is_flat(record.layout);
    at::Tensor local;
    Record widened = record;
    if (in_fp64_) widened.dtype = Dtype::kFloat64;
    for (PartStats& part : parts_of(record, mesh_, rank.rank)) {
      if (numel_of(part, flat) == 0) continue;
      if (!local.defined()) {
        local = rank.tensor(record);
        if (in_fp64_) local = local.to(at::kDouble).div(record.grad_scale);
      }
      (flat ? any_flat_ : any_box_) = true;
      boxes_.push_back(part.box);
      ranges_.push_back(part.range);
      Place place{part.box.global_offset, part.box.size, part.range.global_begin, part.range.count,
                  partial_coordinates(record.layout, mesh_, rank.rank)};
      if (!seen_.insert(std::move(place)).second) continue;
      std::vector<std::byte> scratch;
      const std::byte* bytes =
          packed(widened, part, static_cast<const std::byte*>(local.const_data_ptr()), scratch);
      if (is_partial(record.layout)) {
        at::Tensor addend = at::zeros_like(global_);
        place_part(part, widened, bytes, static_cast<std::byte*>(addend.data_ptr()));
        global_.add_(addend);
      } else {
        place_part(part, widened, bytes, static_cast<std::byte*>(global_.data_ptr()));
      }
    }
  }

  at::Tensor finish() {
    if (any_flat_ && any_box_)
      throw MeshError(
          fmt::format("{}: some ranks give boxes and some flat ranges", describe(first_.key)));
    const std::string problem = any_flat_ ? tiling_problem(first_.layout.global_shape, ranges_)
                                          : tiling_problem(first_.layout.global_shape, boxes_);
    if (!problem.empty()) throw MeshError(fmt::format("{}: {}", describe(first_.key), problem));
    if (!in_fp64_) return global_;
    const double divisor = partial_divisor(first_.layout, mesh_);
    return (divisor == 1 ? global_ : global_.div(divisor)).to(scalar_type_of(first_.dtype));
  }

 private:
  const MeshShape& mesh_;
  const Record& first_;
  bool in_fp64_;
  bool any_flat_ = false, any_box_ = false;
  at::Tensor global_;
  std::set<Place> seen_;
  std::vector<Box> boxes_;
  std::vector<FlatRange> ranges_;
};

}  // namespace

at::Tensor Trace::assemble(const RecordKey& key) const {
  std::optional<Assembly> assembly;
  for (const RankTrace& rank : ranks) {
    const Record* record = rank.find(key);
    if (record == nullptr) continue;
    if (!assembly) assembly.emplace(mesh, *record);
    assembly->add(rank, *record);
  }
  if (!assembly) throw VacuousError(fmt::format("no rank recorded {}", describe(key)));
  return assembly->finish();
}

}  // namespace isoshard
