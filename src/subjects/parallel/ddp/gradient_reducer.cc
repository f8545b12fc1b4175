// SPDX-License-Identifier: Apache-2.0
// Buckets, hooks and the all-reduces of data-parallel training.
#include "subjects/parallel/ddp/gradient_reducer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "subjects/parallel/ddp/accumulated_hook.h"
#include "subjects/parallel/grad_average.h"

namespace isoshard {
std::vector<std::vector<std::size_t>> bucket_assignment_in_order(
    const std::vector<ReducedParameter>& parameters, std::span<const std::size_t> order,
    std::int64_t bucket_bytes) {
  if (bucket_bytes < 1)
    throw UsageError(fmt::format("the bucket size must be at least 1 byte, got {}", bucket_bytes));
  struct Open {
    std::vector<std::size_t> parameters;
    std::int64_t bytes = 0;
  };
  std::map<at::ScalarType, Open> open;
  std::vector<std::vector<std::size_t>> buckets;
  for (const std::size_t i : order) {
    Open& bucket = open[parameters[i].tensor.scalar_type()];
    bucket.parameters.push_back(i);
    bucket.bytes += static_cast<std::int64_t>(parameters[i].tensor.nbytes());
    const std::int64_t limit =
        buckets.empty() ? std::min(kFirstBucketBytes, bucket_bytes) : bucket_bytes;
    if (bucket.bytes >= limit) {
      buckets.push_back(std::move(bucket.parameters));
      bucket = {};
    }
  }
  for (auto& [dtype, bucket] : open) {
    if (!bucket.parameters.empty()) buckets.push_back(std::move(bucket.parameters));
  }
  return buckets;
}

std::vector<std::vector<std::size_t>> bucket_assignment(
    const std::vector<ReducedParameter>& parameters, std::int64_t bucket_bytes) {
  std::vector<std::size_t> order(parameters.size());
  std::iota(order.rbegin(), order.rend(), 0);
  auto buckets = bucket_assignment_in_order(parameters, order, bucket_bytes);
  // In the order in which backward can fill them: by the parameter nearest to the output.
  std::sort(buckets.begin(), buckets.end(),
            [](const auto& a, const auto& b) { return a.front() > b.front(); });
  return buckets;
}

struct GradientReducer::Impl {
  struct Slot {
    std::size_t bucket = 0;
    std::size_t segment = 0;
  };

  struct Bucket {
    std::vector<std::size_t> parameters;
    std::vector<Segment> segments;  // one per parameter, in the bucket's order
    std::vector<bool> packed;
    std::int64_t numel = 0;
    at::Tensor
        flat;  // made when the first gradient comes; of a single parameter the gradient itself
    Work work;
    bool started = false;

    [[nodiscard]] bool full() const {
      return std::find(packed.begin(), packed.end(), false) == packed.end();
    }
    [[nodiscard]] at::Tensor view(std::size_t segment, const at::Tensor& like) const {
      return flat.narrow(0, segments[segment].offset, segments[segment].count).view(like.sizes());
    }
  };

  std::vector<ReducedParameter> parameters;
  Communicator* dp;
  std::vector<Bucket> buckets;
  std::vector<Slot> slots;  // by parameter
  std::size_t next = 0;     // the first bucket that has not started
  bool armed = false;
  std::int64_t bucket_bytes;
  bool has_reduced = false;
  bool will_rebuild;                     // before the second reduction
  std::vector<std::size_t> ready_order;  // of the first reduction's gradients
  AveragedReduction average;
  Instead instead;  // may be empty

  Impl(std::vector<ReducedParameter> parameters_in, Communicator& dp_in,
       std::int64_t bucket_bytes_in, Buckets rule, GradAverage average_in, Instead instead_in)
      : parameters(std::move(parameters_in)),
        dp(&dp_in),
        slots(parameters.size()),
        bucket_bytes(bucket_bytes_in),
        will_rebuild(rule == Buckets::kRebuiltOnce && dp_in.size() > 1),
        average(average_in, dp_in.size()),
        instead(std::move(instead_in)) {
    for (std::vector<std::size_t>& members : bucket_assignment(parameters, bucket_bytes))
      add_bucket(std::move(members));
  }

  // Rank 0's order, followed by the parameters without gradient.
  void rebuild() {
    will_rebuild = false;
    for (std::size_t i = parameters.size(); i-- > 0;) {
      if (std::find(ready_order.begin(), ready_order.end(), i) == ready_order.end())
        ready_order.push_back(i);
    }
    std::vector<std::int64_t> order(ready_order.begin(), ready_order.end());
    const Buffer buffer{reinterpret_cast<std::byte*>(order.data()),
                        static_cast<std::int64_t>(order.size()), Dtype::kInt64};
    dp->broadcast(buffer, 0, {Purpose::kSetup, Axis::kDp, {}}).wait();
    buckets.clear();
    const std::vector<std::size_t> agreed(order.begin(), order.end());
    for (std::vector<std::size_t>& members :
         bucket_assignment_in_order(parameters, agreed, bucket_bytes))
      add_bucket(std::move(members));
  }

  void add_bucket(std::vector<std::size_t> members) {
    Bucket bucket;
    std::int64_t offset = 0;
    for (const std::size_t i : members) {
      const ReducedParameter& parameter = parameters[i];
      slots[i] = {buckets.size(), bucket.segments.size()};
      bucket.segments.push_back(
          {parameter.name, parameter.param_class, offset, parameter.tensor.numel()});
      offset += parameter.tensor.numel();
    }
    bucket.numel = offset;
    bucket.parameters = std::move(members);
    buckets.push_back(std::move(bucket));
  }

  void arm() {
    if (will_rebuild && has_reduced) rebuild();
    for (Bucket& bucket : buckets) {
      bucket.packed.assign(bucket.parameters.size(), false);
      bucket.started = false;
    }
    next = 0;
    armed = true;
  }

  void pack(std::size_t parameter, const at::Tensor& own) {
    const at::Tensor gradient = instead ? instead(parameters[parameter], own) : own;
    Bucket& bucket = buckets[slots[parameter].bucket];
    const std::size_t segment = slots[parameter].segment;
    bucket.packed[segment] = true;
    if (bucket.parameters.size() == 1 && gradient.defined() && gradient.is_contiguous()) {
      bucket.flat = gradient.detach().view({-1});
      return;
    }
    const at::Tensor& like = parameters[parameter].tensor;
    if (!bucket.flat.defined())
      bucket.flat = at::empty({bucket.numel}, like.options().requires_grad(false));
    at::Tensor place = bucket.view(segment, like);
    if (!gradient.defined()) {
      place.zero_();
    } else if (gradient.data_ptr() != place.data_ptr()) {
      place.copy_(gradient);
    }
  }

  void on_accumulated(std::size_t parameter, const at::Tensor& leaf) {
    if (!armed) return;
    const at::NoGradGuard no_grad;
    if (will_rebuild) ready_order.push_back(parameter);
    pack(parameter, leaf.grad());
    start_full_buckets();
  }

  void start_full_buckets() {
    for (; next < buckets.size() && buckets[next].full(); ++next) {
      Bucket& bucket = buckets[next];
      average.scale_before(bucket.flat);
      bucket.work = all_reduce(*dp, bucket.flat, average.reduction(),
                               {Purpose::kGradReduce, Axis::kDp, bucket.segments});
      bucket.started = true;
    }
  }

  void finish() {
    if (!armed)
      throw UsageError(
          "gradients were not armed for reduction: call arm() before the last backward of a step");
    armed = false;
    has_reduced = true;
    const at::NoGradGuard no_grad;
    for (Bucket& bucket : buckets) {
      for (std::size_t s = 0; s < bucket.parameters.size(); ++s) {
        if (!bucket.packed[s])
          pack(bucket.parameters[s], parameters[bucket.parameters[s]].tensor.grad());
      }
    }
    start_full_buckets();
    for (Bucket& bucket : buckets) {
      bucket.work.wait();
      average.scale_after(bucket.flat);
      for (std::size_t s = 0; s < bucket.parameters.size(); ++s) {
        at::Tensor& parameter = parameters[bucket.parameters[s]].tensor;
        parameter.mutable_grad() = bucket.view(s, parameter);
      }
    }
  }
};

GradientReducer::GradientReducer(std::vector<ReducedParameter> parameters, Communicator& dp,
                                 std::int64_t bucket_bytes, Buckets buckets, GradAverage average,
                                 Instead instead)
    : impl_(std::make_shared<Impl>(std::move(parameters), dp, bucket_bytes, buckets, average,
                                   std::move(instead))) {
  for (std::size_t i = 0; i < impl_->parameters.size(); ++i) {
    const std::weak_ptr<Impl> weak = impl_;
    // The reducer may be gone when the graph is not.
    set_accumulated_hook(impl_->parameters[i].tensor, [weak, i](const at::Tensor& leaf) {
      if (const std::shared_ptr<Impl> impl = weak.lock()) impl->on_accumulated(i, leaf);
    });
  }
}

GradientReducer::~GradientReducer() = default;
void GradientReducer::arm() {
  impl_->arm();
}
void GradientReducer::finish() {
  impl_->finish();
}
std::size_t GradientReducer::num_buckets() const noexcept {
  return impl_->buckets.size();
}

std::vector<std::vector<std::string>> GradientReducer::bucket_names() const {
  std::vector<std::vector<std::string>> names;
  for (const Impl::Bucket& bucket : impl_->buckets) {
    std::vector<std::string>& own = names.emplace_back();
    for (const std::size_t i : bucket.parameters) own.push_back(impl_->parameters[i].name);
  }
  return names;
}

}  // namespace isoshard
