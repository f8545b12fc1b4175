// SPDX-License-Identifier: Apache-2.0
// Sum of squares over tp shards.
#include "train/grad_norm.h"

#include <cmath>
#include <utility>

#include "optim/clip.h"

namespace isoshard {

GlobalGradNorm::GlobalGradNorm(std::vector<ParameterSpec> specs, const ShardPlan& plan, Communicator& tp)
    : specs_(std::move(specs)), plan_(plan), tp_(&tp) {
  for (const ParameterSpec& spec : specs_) {
    if (plan.sharded_dim(spec) >= 0) split_.push_back({spec.name, plan.class_of(spec), static_cast<std::int64_t>(split_.size()), 1});
  }
}

double GlobalGradNorm::norm(const NamedTensors& gradients) {
  const auto squares_of = [&](const std::string& name) { return sum_of_squares({{name, gradients.at(name)}}); };
  std::vector<double> split_squares;
  for (const ParameterSpec& spec : specs_) {
    if (plan_.sharded_dim(spec) < 0) continue;
    split_squares.push_back(plan_.counts_shard(spec, tp_->rank()) ? squares_of(spec.name) : 0.0);
  }
  if (!split_.empty()) {
    const Buffer buffer{reinterpret_cast<std::byte*>(split_squares.data()), static_cast<std::int64_t>(split_squares.size()),
                        Dtype::kFloat64};
    tp_->all_reduce(buffer, Reduction::kSum, {Purpose::kClipNorm, Axis::kTp, split_}).wait();
  }
  double total = 0;
  std::size_t next_split = 0;
  for (const ParameterSpec& spec : specs_) {
    const bool is_split = next_split < split_.size() && split_[next_split].name == spec.name;
    total += is_split ? split_squares[next_split++] : squares_of(spec.name);
  }
  return std::sqrt(total);
}

}  // namespace isoshard
