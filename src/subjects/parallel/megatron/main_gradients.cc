// SPDX-License-Identifier: Apache-2.0
// Buckets of main gradients and of parameters.
#include "subjects/parallel/megatron/main_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "core/comm/tensor.h"
#include "subjects/parallel/grad_average.h"

namespace isoshard {

at::Tensor MainGradients::Bucket::part(const at::Tensor& flat, int dp, int dp_rank) const {
  const std::int64_t count = flat.numel() / dp;
  return flat.narrow(0, dp_rank * count, count);
}

void MainGradients::setup(DataParallelSetup setup) {
  const at::NoGradGuard no_grad;
  mesh_ = setup.mesh;
  dp_ = mesh_->degree(Axis::kDp);
  dp_rank_ = mesh_->coordinate(Axis::kDp);
  const at::Tensor& first = setup.parameters.front().tensor;
  const Dtype gradients = main_gradient_dtype(dtype_of(first));
  gradient_type_ = scalar_type_of(gradients);
  master_type_ =
      setup.master_dtype.has_value() ? scalar_type_of(*setup.master_dtype) : first.scalar_type();

  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (const HeldParameter& parameter : setup.parameters) {
    names.push_back(parameter.name);
    shapes.push_back(parameter.tensor.sizes().vec());
  }
  const std::vector<StoredParameter> stored = stored_parameters(names, shapes, fused_);
  std::vector<StoredParameter> trained;
  for (const StoredParameter& unit : stored) {
    const bool is_frozen = is_frozen_unit(
        unit, [&](std::size_t i) { return !setup.parameters[i].tensor.requires_grad(); });
    if (is_frozen) {
      add_frozen(unit, setup.parameters);
    } else {
      trained.push_back(unit);
    }
  }
  std::vector<std::int64_t> numels;
  for (const StoredParameter& parameter : trained) numels.push_back(numel_of(parameter.shape));
  const std::int64_t bucket_numel =
      std::max<std::int64_t>(1, setup.bucket_bytes / static_cast<std::int64_t>(size_of(gradients)));
  for (const BufferBucket& bucket :
       buffer_buckets(numels, bucket_numel, dp_, steps_ == Steps::kDistributed)) {
    add_bucket(bucket, trained, setup.parameters);
  }
  refresh_held();
  for (const auto& [name, place] : places_) {
    if (is_frozen(place)) continue;
    const at::Tensor& leaf = stored_[place.stored].parameter;
    const bool is_stepped_in_place = steps_ == Steps::kEverywhere &&
                                     leaf.scalar_type() == master_type_ &&
                                     read_.at(name).is_same(held_.at(name));
    masters_[name] = is_stepped_in_place
                         ? leaf
                         : piece_of(held_.at(name).detach(), place)
                               .to(master_type_, /*non_blocking=*/false, /*copy=*/true);
  }
}

// It is kept as Megatron keeps any, and is in no buffer.
void MainGradients::add_frozen(const StoredParameter& unit,
                               std::vector<HeldParameter>& parameters) {
  const at::Tensor value =
      at::empty(unit.shape, parameters.front().tensor.options().requires_grad(false));
  for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
    HeldParameter& parameter = parameters[unit.parameters[p]];
    const at::Tensor flat = parameter.tensor.detach().reshape({-1});
    for (const StoredRun& run : unit.runs[p])
      value.view({-1}).narrow(0, run.stored, run.count).copy_(flat.narrow(0, run.begin, run.count));
    read_[parameter.name] = value;
    places_[parameter.name] = {std::move(parameter.layout),
                               parameter.tensor.sizes().vec(),
                               stored_.size(),
                               unit.runs[p],
                               {}};
  }
  stored_.push_back({value, {}});
}

void MainGradients::add_bucket(const BufferBucket& layout,
                               const std::vector<StoredParameter>& stored,
                               std::vector<HeldParameter>& parameters) {
  Bucket bucket;
  const at::TensorOptions options = parameters.front().tensor.options().requires_grad(false);
  bucket.gradients = at::zeros({layout.numel}, options.dtype(gradient_type_));
  if (steps_ == Steps::kDistributed) bucket.parameters = at::zeros({layout.numel}, options);
  for (std::size_t i = 0; i < layout.parameters.size(); ++i) {
    const StoredParameter& unit = stored[layout.parameters[i]];
    const std::int64_t begin = layout.begins[i], numel = numel_of(unit.shape);
    const auto at_place = [&](const at::Tensor& flat) {
      return flat.narrow(0, begin, numel).view(unit.shape);
    };
    at::Tensor value = steps_ == Steps::kDistributed ? at_place(bucket.parameters)
                                                     : at::empty(unit.shape, options);
    for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
      const at::Tensor flat = parameters[unit.parameters[p]].tensor.detach().reshape({-1});
      for (const StoredRun& run : unit.runs[p]) {
        value.view({-1})
            .narrow(0, run.stored, run.count)
            .copy_(flat.narrow(0, run.begin, run.count));
      }
    }
    // A parameter that is stored by itself stays the leaf that it is.
    at::Tensor leaf = unit.parameters.size() == 1 ? parameters[unit.parameters[0]].tensor
                                                  : at::empty({0}, options).requires_grad_(true);
    leaf.set_data(value);
    for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
      HeldParameter& parameter = parameters[unit.parameters[p]];
      Place place{std::move(parameter.layout),
                  parameter.tensor.sizes().vec(),
                  stored_.size(),
                  unit.runs[p],
                  {}};
      for (const StoredRun& run : place.runs)
        bucket.segments.push_back(
            {parameter.name, parameter.param_class, begin + run.stored, run.count});
      place.own = is_cut_over_dp() ? owned_runs(layout, begin, place.runs, dp_, dp_rank_)
                                   : std::vector<Range>{{0, parameter.tensor.numel()}};
      read_[parameter.name] = leaf;
      places_[parameter.name] = std::move(place);
    }
    stored_.push_back({leaf, at_place(bucket.gradients)});
  }
  buckets_.push_back(std::move(bucket));
}

at::Tensor MainGradients::whole_of(const at::Tensor& stored, const Place& place) const {
  const at::Tensor flat = stored.view({-1});
  if (place.runs.size() == 1)
    return flat.narrow(0, place.runs[0].stored, place.runs[0].count).view(place.shape);
  std::vector<at::Tensor> runs;
  for (const StoredRun& run : place.runs) runs.push_back(flat.narrow(0, run.stored, run.count));
  return at::cat(runs).view(place.shape);
}

at::Tensor MainGradients::piece_of(const at::Tensor& whole, const Place& place) const {
  if (place.own.size() == 1 && place.own[0].count == whole.numel()) return whole;
  const at::Tensor flat = whole.reshape({-1});
  std::vector<at::Tensor> runs{flat.narrow(0, 0, 0)};
  for (const Range& run : place.own) runs.push_back(flat.narrow(0, run.begin, run.count));
  return at::cat(runs);
}

// Parameters that are stored by themselves are held as they are, those of fused layers as copies.
void MainGradients::refresh_held() {
  for (const auto& [name, place] : places_) {
    const at::Tensor& leaf = stored_[place.stored].parameter;
    const bool is_alone = leaf.numel() == numel_of(place.shape);
    held_[name] = is_alone ? leaf : whole_of(leaf.detach(), place).clone();
  }
}

at::Tensor MainGradients::held_in(std::string_view name, const at::Tensor& read) const {
  const Place& place = places_.find(name)->second;
  return read.numel() == numel_of(place.shape) ? read : whole_of(read.detach(), place);
}

void MainGradients::clear_gradients() {
  for (Stored& stored : stored_) stored.parameter.mutable_grad().reset();
  for (Bucket& bucket : buckets_) bucket.gradients.zero_();
}

void MainGradients::after_backward(bool reduces, bool /*is_last*/) {
  const at::NoGradGuard no_grad;
  for (Stored& stored : stored_) {
    if (!stored.parameter.grad().defined()) continue;
    stored.gradient.add_(stored.parameter.grad());
    stored.parameter.mutable_grad().reset();
  }
  if (reduces) reduce();
}

void MainGradients::reduce() {
  Communicator& group = mesh_->group(Axis::kDp);
  const AveragedReduction average(average_, dp_);
  for (const Bucket& bucket : buckets_) {
    const CallInfo info{Purpose::kGradReduce, Axis::kDp, bucket.segments};
    average.scale_before(bucket.gradients);
    if (steps_ == Steps::kDistributed) {
      const at::Tensor own = bucket.part(bucket.gradients, dp_, dp_rank_);
      own.copy_(reduce_scatter(group, bucket.gradients, average.reduction(), info));
      average.scale_after(own);
    } else {
      all_reduce(group, bucket.gradients, average.reduction(), info).wait();
      average.scale_after(bucket.gradients);
    }
  }
}

AccumulatedGradients MainGradients::accumulated() const {
  AccumulatedGradients sums;
  for (const auto& [name, place] : places_) {
    if (!is_frozen(place)) sums.gradients[name] = whole_of(stored_[place.stored].gradient, place);
  }
  return sums;
}

NamedTensors MainGradients::gradients() {
  const at::NoGradGuard no_grad;
  NamedTensors gradients;
  for (const auto& [name, place] : places_) {
    if (is_frozen(place)) continue;
    gradients[name] =
        piece_of(whole_of(stored_[place.stored].gradient, place), place).to(master_type_);
  }
  return gradients;
}

Layout MainGradients::piece_layout(std::string_view name) const {
  const Place& place = places_.find(name)->second;
  if (!is_cut_over_dp()) return place.layout;
  Layout all = replicated(place.layout.global_shape);
  all.explicit_parts = true;
  std::int64_t before = 0;
  for (const Range& own : place.own) {
    for (FlatRange range : layout_of_run(place.layout, place.shape, mesh_->shape(), mesh_->rank(),
                                         own.begin, own.count)
                               .flat) {
      range.local_begin += before;
      all.flat.push_back(range);
    }
    before += own.count;
  }
  return all;
}

void MainGradients::publish() {
  const at::NoGradGuard no_grad;
  for (const auto& [name, master] : masters_) {
    const Place& place = places_.at(name);
    const at::Tensor& leaf = stored_[place.stored].parameter;
    if (master.numel() == 0 || master.is_same(leaf)) continue;
    const at::Tensor whole = whole_of(leaf.detach(), place).reshape({-1}).clone();
    std::int64_t before = 0;
    for (const Range& own : place.own) {
      whole.narrow(0, own.begin, own.count)
          .copy_(master.reshape({-1}).narrow(0, before, own.count));
      before += own.count;
    }
    for (const StoredRun& run : place.runs) {
      leaf.detach()
          .view({-1})
          .narrow(0, run.stored, run.count)
          .copy_(whole.narrow(0, run.begin, run.count));
    }
  }
  for (const Bucket& bucket : buckets_) {
    if (steps_ != Steps::kDistributed) break;
    const at::Tensor own = bucket.part(bucket.parameters, dp_, dp_rank_).clone();
    bucket.parameters.copy_(all_gather(mesh_->group(Axis::kDp), own,
                                       {Purpose::kParamGather, Axis::kDp, bucket.segments}));
  }
  refresh_held();
}

}  // namespace isoshard
