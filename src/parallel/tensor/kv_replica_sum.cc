// SPDX-License-Identifier: Apache-2.0
// One flat sum over the holders of a kv head.
#include "parallel/tensor/kv_replica_sum.h"

#include <ATen/ATen.h>

#include "comm/tensor.h"

namespace isoshard {

KvReplicaSum::KvReplicaSum(const std::vector<ParameterSpec>& specs, const ShardPlan& plan, Communicator& tp) {
  for (const ParameterSpec& spec : specs) {
    if (plan.class_of(spec) == ParamClass::kKvReplica) names_.push_back(spec.name);
  }
  if (!names_.empty()) holders_ = tp.split(plan.kv_head_of_rank.at(static_cast<std::size_t>(tp.rank())), tp.rank());
}

void KvReplicaSum::reduce(const std::map<std::string, at::Tensor, std::less<>>& gradients) {
  if (names_.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> pieces;
  std::vector<Segment> segments;
  std::int64_t offset = 0;
  for (const std::string& name : names_) {
    pieces.push_back(gradients.find(name)->second.flatten());
    segments.push_back({name, ParamClass::kKvReplica, offset, pieces.back().numel()});
    offset += pieces.back().numel();
  }
  const at::Tensor flat = at::cat(pieces);
  all_reduce(*holders_, flat, Reduction::kSum, {Purpose::kGradReduce, Axis::kTp, segments}).wait();
  for (const Segment& segment : segments) {
    const at::Tensor& gradient = gradients.find(segment.name)->second;
    gradient.copy_(flat.narrow(0, segment.offset, segment.count).view(gradient.sizes()));
  }
}

}  // namespace isoshard
