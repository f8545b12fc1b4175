// SPDX-License-Identifier: Apache-2.0
// One flat sum over the holders of a kv head, one over tp for the norms of heads.
#include "parallel/tensor/partial_grad_sum.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "comm/tensor.h"

namespace isoshard {
namespace {

using Gradients = std::map<std::string, at::Tensor, std::less<>>;

void sum_over(Communicator& group, const std::vector<std::string>& names, ParamClass param_class, const Gradients& gradients) {
  std::vector<at::Tensor> pieces;
  std::vector<Segment> segments;
  std::int64_t offset = 0;
  for (const std::string& name : names) {
    pieces.push_back(gradients.find(name)->second.flatten());
    segments.push_back({name, param_class, offset, pieces.back().numel()});
    offset += pieces.back().numel();
  }
  const at::Tensor flat = at::cat(pieces);
  if (flat.numel() == 0) return;  // other dp ranks go on with them: so on every rank of this group
  all_reduce(group, flat, Reduction::kSum, {Purpose::kGradReduce, Axis::kTp, segments}).wait();
  for (const Segment& segment : segments) {
    const at::Tensor& gradient = gradients.find(segment.name)->second;
    gradient.copy_(flat.narrow(0, segment.offset, segment.count).view(gradient.sizes()));
  }
}

}  // namespace

PartialGradSum::PartialGradSum(const std::vector<ParameterSpec>& specs, const ShardPlan& plan, Communicator& tp) : tp_(&tp) {
  if (tp.size() == 1) return;
  for (const ParameterSpec& spec : specs) {
    const ParamClass param_class = plan.class_of(spec);
    if (param_class == ParamClass::kKvReplica) kv_names_.push_back(spec.name);
    if (param_class == ParamClass::kQkNorm) qk_norm_names_.push_back(spec.name);
  }
  if (!kv_names_.empty()) holders_ = tp.split(plan.kv_head_of_rank.at(static_cast<std::size_t>(tp.rank())), tp.rank());
}

void PartialGradSum::reduce(const Gradients& gradients) {
  const at::NoGradGuard no_grad;
  if (!kv_names_.empty()) sum_over(*holders_, kv_names_, ParamClass::kKvReplica, gradients);
  if (!qk_norm_names_.empty()) sum_over(*tp_, qk_norm_names_, ParamClass::kQkNorm, gradients);
}

}  // namespace isoshard
