// SPDX-License-Identifier: Apache-2.0
// Buckets that are reduced to their owners.
#include "subjects/parallel/zero/owner_reducer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "subjects/parallel/ddp/accumulated_hook.h"
#include "subjects/parallel/grad_average.h"

namespace isoshard {

struct OwnerReducer::Impl {
  struct Bucket {
    std::vector<std::size_t> parameters;
    std::vector<Segment> segments;     // of the flat buffer: one for each run, empty ones left out
    std::vector<std::int64_t> counts;  // of the flat buffer, by owner
    std::size_t ready = 0;             // parameters whose gradient has come
  };

  std::vector<ReducedParameter> parameters;
  ZeroPartition partition;
  Communicator* dp;
  std::vector<Bucket> buckets;
  std::vector<std::size_t> bucket_of;  // by parameter
  std::size_t next = 0;                // the first bucket that is not reduced
  bool armed = false;
  NamedTensors sums;
  AveragedReduction average;
  at::ScalarType added_in;

  Impl(std::vector<ReducedParameter> parameters_in, ZeroPartition partition_in, Communicator& dp_in,
       std::int64_t bucket_bytes, GradAverage average_in, std::optional<Dtype> accumulate_dtype)
      : parameters(std::move(parameters_in)),
        partition(std::move(partition_in)),
        dp(&dp_in),
        bucket_of(parameters.size()),
        average(average_in, dp_in.size()),
        added_in(accumulate_dtype.has_value() ? scalar_type_of(*accumulate_dtype)
                                              : parameters.front().tensor.scalar_type()) {
    std::vector<std::int64_t> numels;
    for (const ReducedParameter& parameter : parameters) numels.push_back(parameter.tensor.numel());
    const auto element = static_cast<std::int64_t>(parameters.front().tensor.element_size());
    for (std::vector<std::size_t>& members :
         zero_buckets(numels, std::max<std::int64_t>(bucket_bytes / element, 1))) {
      add_bucket(std::move(members));
    }
  }

  void add_bucket(std::vector<std::size_t> members) {
    Bucket bucket;
    std::int64_t offset = 0;
    for (std::size_t owner = 0; owner < partition.num_parts; ++owner) {
      const std::int64_t first = offset;
      for (const std::size_t i : members) {
        const Range& run = partition.runs[i][owner];
        if (run.count > 0)
          bucket.segments.push_back(
              {parameters[i].name, parameters[i].param_class, offset, run.count});
        offset += run.count;
      }
      bucket.counts.push_back(offset - first);
    }
    for (const std::size_t i : members) bucket_of[i] = buckets.size();
    bucket.parameters = std::move(members);
    buckets.push_back(std::move(bucket));
  }

  void arm() {
    for (Bucket& bucket : buckets) bucket.ready = 0;
    next = 0;
    armed = true;
  }

  void on_accumulated(std::size_t parameter) {
    if (!armed) return;
    const at::NoGradGuard no_grad;
    ++buckets[bucket_of[parameter]].ready;
    for (; next < buckets.size() && buckets[next].ready == buckets[next].parameters.size(); ++next)
      reduce(buckets[next]);
  }

  void reduce(const Bucket& bucket) {
    std::vector<at::Tensor> runs;
    for (std::size_t owner = 0; owner < partition.num_parts; ++owner) {
      for (const std::size_t i : bucket.parameters) {
        const Range& run = partition.runs[i][owner];
        const at::Tensor& tensor = parameters[i].tensor;
        const at::Tensor gradient =
            tensor.grad().defined() ? tensor.grad() : at::zeros_like(tensor).detach();
        runs.push_back(gradient.reshape({-1}).narrow(0, run.begin, run.count));
      }
    }
    const at::Tensor flat = at::cat(runs);
    runs.clear();
    for (const std::size_t i : bucket.parameters) parameters[i].tensor.mutable_grad().reset();
    const at::Tensor own =
        at::empty({bucket.counts[static_cast<std::size_t>(dp->rank())]}, flat.options());
    average.scale_before(flat);
    dp->reduce_scatter_uneven(buffer_of(flat), buffer_of(own), bucket.counts, average.reduction(),
                              {Purpose::kGradReduce, Axis::kDp, bucket.segments})
        .wait();
    average.scale_after(own);
    add(bucket, own.to(added_in));
  }

  void add(const Bucket& bucket, const at::Tensor& own) {
    std::int64_t offset = 0;
    for (const std::size_t i : bucket.parameters) {
      const std::int64_t count = partition.runs[i][static_cast<std::size_t>(dp->rank())].count;
      const at::Tensor piece = own.narrow(0, offset, count);
      at::Tensor& sum = sums[parameters[i].name];
      if (sum.defined()) {
        sum.add_(piece);
      } else {
        sum = piece.clone();
      }
      offset += count;
    }
  }

  void finish() {
    if (!armed)
      throw UsageError("gradients were not armed for reduction: call arm() before each backward");
    armed = false;
    const at::NoGradGuard no_grad;
    for (; next < buckets.size(); ++next) reduce(buckets[next]);
  }
};

OwnerReducer::OwnerReducer(std::vector<ReducedParameter> parameters, ZeroPartition partition,
                           Communicator& dp, std::int64_t bucket_bytes, GradAverage average,
                           std::optional<Dtype> accumulate_dtype)
    : impl_(std::make_shared<Impl>(std::move(parameters), std::move(partition), dp, bucket_bytes,
                                   average, accumulate_dtype)) {
  for (std::size_t i = 0; i < impl_->parameters.size(); ++i) {
    const std::weak_ptr<Impl> weak = impl_;
    set_accumulated_hook(impl_->parameters[i].tensor, [weak, i](const at::Tensor& /*leaf*/) {
      if (const std::shared_ptr<Impl> impl = weak.lock()) impl->on_accumulated(i);
    });
  }
}

OwnerReducer::~OwnerReducer() = default;
void OwnerReducer::clear() {
  impl_->sums.clear();
}
void OwnerReducer::arm() {
  impl_->arm();
}
void OwnerReducer::finish() {
  impl_->finish();
}
const NamedTensors& OwnerReducer::pieces() const noexcept {
  return impl_->sums;
}

}  // namespace isoshard
