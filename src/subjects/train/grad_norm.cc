// SPDX-License-Identifier: Apache-2.0
// Sum of squares over tp shards.
#include "subjects/train/grad_norm.h"

#include <cmath>
#include <utility>

#include "subjects/optim/clip.h"

namespace isoshard {

namespace {

void sum(std::vector<double>& values, Communicator& group, Axis axis,
         const std::vector<Segment>& segments) {
  const Buffer buffer{reinterpret_cast<std::byte*>(values.data()),
                      static_cast<std::int64_t>(values.size()), Dtype::kFloat64};
  group.all_reduce(buffer, Reduction::kSum, {Purpose::kClipNorm, axis, segments}).wait();
}

}  // namespace

GlobalGradNorm::GlobalGradNorm(std::vector<ParameterSpec> specs, const ShardPlan& plan,
                               Communicator& tp, Communicator* dp, NormOverStages stages)
    : specs_(std::move(specs)), plan_(plan), tp_(&tp), dp_(dp), stages_(std::move(stages)) {
  const auto add = [&](std::vector<Segment>& segments, const ParameterSpec& spec) {
    segments.push_back(
        {spec.name, plan.class_of(spec), static_cast<std::int64_t>(segments.size()), 1});
  };
  for (const ParameterSpec& spec : specs_) {
    add(all_, spec);
    if (plan.sharded_dim(spec) >= 0) add(split_, spec);
  }
}

double GlobalGradNorm::norm(const NamedTensors& gradients) {
  std::vector<double> squares, split_squares;
  for (const ParameterSpec& spec : specs_) {
    const bool counts = stages_.pp == nullptr || stages_.counted.contains(spec.name);
    squares.push_back(counts ? sum_of_squares({{spec.name, gradients.at(spec.name)}}) : 0.0);
  }
  if (dp_ != nullptr) sum(squares, *dp_, Axis::kDp, all_);
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (plan_.sharded_dim(specs_[i]) >= 0)
      split_squares.push_back(plan_.counts_shard(specs_[i], tp_->rank()) ? squares[i] : 0.0);
  }
  if (!split_.empty()) sum(split_squares, *tp_, Axis::kTp, split_);
  std::size_t next_split = 0;
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    const bool is_split = next_split < split_.size() && split_[next_split].name == specs_[i].name;
    if (is_split) squares[i] = split_squares[next_split++];
  }
  if (stages_.pp != nullptr) sum(squares, *stages_.pp, Axis::kPp, all_);
  double total = 0;
  for (const double square : squares) total += square;
  return std::sqrt(total);
}

}  // namespace isoshard
