// SPDX-License-Identifier: Apache-2.0
// How gradients are added over ranks: buckets over dp, then sums over holders.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "suite/emulation/emulated_parts.h"
#include "suite/emulation/emulated_rank.h"
#include "suite/emulation/emulated_reduction.h"

namespace isoshard {

void EmulatedRank::watch_gradient(const std::string& name) {
  if (!run_->numerics.data.buckets.rebuilt.has_value() || is_frozen_(name)) return;
  const auto spec = std::ranges::find(trained_, name, &ParameterSpec::name);
  const std::int64_t index = spec - trained_.begin();
  parameters_.at(name).register_hook([this, index](const at::Tensor& /*gradient*/) {
    if (is_watching_) ready_order_.push_back(index);
  });
}

std::vector<std::vector<std::string>> EmulatedRank::rebuilt_buckets() {
  const std::vector<ParameterSpec>& specs = trained_;
  const RebuiltBuckets& limits = *run_->numerics.data.buckets.rebuilt;
  for (std::size_t i = specs.size(); i-- > 0;) {
    const auto index = static_cast<std::int64_t>(i);
    if (std::find(ready_order_.begin(), ready_order_.end(), index) == ready_order_.end())
      ready_order_.push_back(index);
  }
  const at::Tensor own = at::tensor(ready_order_, at::kLong);
  const at::Tensor first =
      world_->gather_over(Axis::kDp, rank_, "order of gradients", own).narrow(0, 0, own.numel());
  std::vector<std::vector<std::string>> buckets;
  std::int64_t bytes = 0;
  for (std::int64_t i = 0; i < first.numel(); ++i) {
    const std::string& name =
        specs.at(static_cast<std::size_t>(first[i].item<std::int64_t>())).name;
    if (bytes == 0) buckets.emplace_back();
    buckets.back().push_back(name);
    bytes += parameters_.at(name).numel() *
             static_cast<std::int64_t>(size_of(run_->numerics.precision.dtype));
    if (bytes >= (buckets.size() == 1 ? limits.first_bytes : limits.bytes)) bytes = 0;
  }
  return buckets;
}

// From whole gradients to those of what this rank steps.
void EmulatedRank::reduce_over_dp() {
  std::set<std::string> reduced;
  const NumericsSpec& numerics = run_->numerics;
  is_watching_ = false;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const std::vector<std::string>& bucket = buckets_[b];
    for (const std::string& name : bucket) {
      if (!reduced.insert(name).second)
        throw UsageError(
            fmt::format("the declared arithmetic reduces the gradient of {} twice", name));
    }
    if (numerics.data.sharding.reduces_to_owner) {
      reduce_bucket_to_owners(bucket);
    } else {
      reduce_bucket(bucket, numerics.data.buckets.places.empty()
                                ? nullptr
                                : &numerics.data.buckets.places.at(b));
    }
  }
  for (const ParameterSpec& spec : trained_) {
    if (!reduced.contains(spec.name))
      throw UsageError(fmt::format("the declared arithmetic reduces no gradient of {}", spec.name));
  }
  if (numerics.data.buckets.rebuilt.has_value() && !is_rebuilt_) buckets_ = rebuilt_buckets();
  is_rebuilt_ = true;
}

void EmulatedRank::reduce_bucket(const std::vector<std::string>& bucket,
                                 const BucketPlaces* places) {
  reduce_flat(bucket, places, [&](at::Tensor flat) {
    return world_->reduce_over(Axis::kDp, rank_, bucket.front(), std::move(flat),
                               run_->numerics.data.parameter_gradient);
  });
  for (const std::string& name : bucket) gradients_.at(name) = piece_of(name, gradients_.at(name));
}

void EmulatedRank::reduce_bucket_to_owners(const std::vector<std::string>& bucket) {
  const NumericsSpec& numerics = run_->numerics;
  std::vector<at::Tensor> pieces;
  ReductionPoint point = numerics.data.parameter_gradient;
  const std::vector<int> members = shard_members();
  for (std::size_t owner = 0; owner < members.size(); ++owner) {
    std::int64_t& size = point.chunks.emplace_back();
    for (const std::string& name : bucket) {
      for (const Range& run : numerics.data.sharding.stepped_runs.at(name).at(owner)) {
        pieces.push_back(gradients_.at(name).reshape({-1}).narrow(0, run.begin, run.count));
        size += run.count;
      }
    }
  }
  at::Tensor flat = at::cat(pieces);
  if (point.dtype.has_value()) flat = flat.to(float_type_of(*point.dtype));
  pieces.clear();
  // their memory is free for the sums
  for (const std::string& name : bucket) gradients_.at(name).reset();
  const at::Tensor reduced = world_->reduce(rank_, members, bucket.front(), std::move(flat), point);
  const auto own_rank = static_cast<std::ptrdiff_t>(shard_rank());
  std::int64_t offset =
      std::accumulate(point.chunks.begin(), point.chunks.begin() + own_rank, std::int64_t{0});
  for (const std::string& name : bucket) {
    const at::Tensor own = piece_of(name, parameters_.at(name).detach());
    gradients_.at(name) = reduced.narrow(0, offset, own.numel()).view(own.sizes());
    offset += own.numel();
  }
  if (numerics.data.sharding.groups.replicas > 1) average_over_replicas(bucket);
}

void EmulatedRank::average_over_replicas(const std::vector<std::string>& bucket) {
  const NumericsSpec& numerics = run_->numerics;
  std::vector<std::int64_t> longest;
  std::int64_t size = 0;
  for (const std::string& name : bucket) {
    std::int64_t& most = longest.emplace_back(0);
    for (const std::vector<Range>& runs : numerics.data.sharding.stepped_runs.at(name)) {
      std::int64_t count = 0;
      for (const Range& run : runs) count += run.count;
      most = std::max(most, count);
    }
    size += most;
  }
  const at::Tensor flat = at::zeros({size}, gradients_.at(bucket.front()).options());
  std::int64_t place = 0;
  for (std::size_t i = 0; i < bucket.size(); ++i) {
    const at::Tensor& own = gradients_.at(bucket[i]);
    flat.narrow(0, place, own.numel()).copy_(own.reshape({-1}));
    place += longest[i];
  }
  const at::Tensor mean = world_->reduce(rank_, replica_members(), bucket.front() + " of replicas",
                                         flat, numerics.data.replica_gradient);
  place = 0;
  for (std::size_t i = 0; i < bucket.size(); ++i) {
    at::Tensor& own = gradients_.at(bucket[i]);
    own = mean.narrow(0, place, own.numel()).view(own.sizes());
    place += longest[i];
  }
}

// Ranks are numbered with dp before cp.
std::vector<int> EmulatedRank::shard_members() const {
  const ShardGrouping& groups = run_->numerics.data.sharding.groups;
  const MeshShape& mesh = world_->mesh();
  const int dp_shard = mesh.degree(Axis::kDp) / groups.replicas;
  const auto is_together = [&](int other) {
    return mesh.coordinate(other, Axis::kPp) == coordinate(Axis::kPp) &&
           mesh.coordinate(other, Axis::kTp) == coordinate(Axis::kTp) &&
           mesh.coordinate(other, Axis::kDp) / dp_shard == coordinate(Axis::kDp) / dp_shard &&
           (groups.spans_context || mesh.coordinate(other, Axis::kCp) == coordinate(Axis::kCp));
  };
  std::vector<int> members;
  for (int other = 0; other < mesh.world_size(); ++other) {
    if (is_together(other)) members.push_back(other);
  }
  return members;
}

std::size_t EmulatedRank::shard_rank() const {
  const std::vector<int> members = shard_members();
  return static_cast<std::size_t>(std::find(members.begin(), members.end(), rank_) -
                                  members.begin());
}

// The ranks in this one's place of each group.
std::vector<int> EmulatedRank::replica_members() const {
  const MeshShape& mesh = world_->mesh();
  const int dp_shard = mesh.degree(Axis::kDp) / run_->numerics.data.sharding.groups.replicas;
  std::vector<int> members;
  for (const int other : mesh.group_of(rank_, Axis::kDp)) {
    if (mesh.coordinate(other, Axis::kDp) % dp_shard == coordinate(Axis::kDp) % dp_shard)
      members.push_back(other);
  }
  return members;
}

void EmulatedRank::reduce_flat(const std::vector<std::string>& names, const BucketPlaces* places,
                               const std::function<at::Tensor(at::Tensor)>& reduce) {
  std::vector<at::Tensor> pieces;
  std::vector<Shape> shapes;
  std::vector<std::vector<PlacedRun>> runs;
  std::int64_t end = 0;
  for (const std::string& name : names) {
    shapes.push_back(gradients_.at(name).sizes().vec());
    pieces.push_back(gradients_.at(name).flatten());
    runs.push_back(places == nullptr ? std::vector<PlacedRun>{{0, end, pieces.back().numel()}}
                                     : places->runs.at(runs.size()));
    end += pieces.back().numel();
  }
  const bool is_whole = places == nullptr && pieces.size() == 1;
  at::Tensor flat =
      is_whole ? pieces.front()
               : at::zeros({places == nullptr ? end : places->numel}, pieces.front().options());
  for (std::size_t i = 0; !is_whole && i < pieces.size(); ++i) {
    for (const PlacedRun& run : runs[i])
      flat.narrow(0, run.place, run.count).copy_(pieces[i].narrow(0, run.begin, run.count));
  }
  if (flat.numel() == 0) return;
  pieces.clear();
  // their memory is free for the sums
  for (const std::string& name : names) gradients_.at(name).reset();
  const at::Tensor reduced = reduce(std::move(flat));
  for (std::size_t i = 0; i < names.size(); ++i) {
    at::Tensor& gradient = gradients_.at(names[i]);
    if (runs[i].size() == 1) {
      gradient = reduced.narrow(0, runs[i][0].place, runs[i][0].count).view(shapes[i]);
      continue;
    }
    std::vector<at::Tensor> parts;
    for (const PlacedRun& run : runs[i]) parts.push_back(reduced.narrow(0, run.place, run.count));
    gradient = at::cat(parts).view(shapes[i]);
  }
}

// World ranks of the own tp group that hold the same parts.
std::vector<int> EmulatedRank::holders_of(const std::vector<std::string>& names) const {
  const auto holds_the_same = [&](int tp_rank) {
    return std::all_of(names.begin(), names.end(), [&](const std::string& name) {
      const ParameterCut* cut = cut_of(run_->numerics.tensor, name);
      return cut == nullptr || ranges_of(*cut, tp_rank) == ranges_of(*cut, coordinate(Axis::kTp));
    });
  };
  std::vector<int> holders;
  for (const int member : world_->mesh().group_of(rank_, Axis::kTp)) {
    if (holds_the_same(world_->coordinate(member, Axis::kTp))) holders.push_back(member);
  }
  return holders;
}

}  // namespace isoshard
