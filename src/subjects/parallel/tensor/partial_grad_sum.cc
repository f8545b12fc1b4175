// SPDX-License-Identifier: Apache-2.0
// One flat sum over the holders of a kv head, one over tp for the norms of heads.
#include "subjects/parallel/tensor/partial_grad_sum.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "core/comm/tensor.h"

namespace isoshard {
namespace {

using Gradients = std::map<std::string, at::Tensor, std::less<>>;

void sum_over(Communicator& group,
              const std::vector<std::pair<std::string, ParamClass>>& parameters,
              const Gradients& gradients) {
  std::vector<at::Tensor> pieces;
  std::vector<Segment> segments;
  std::int64_t offset = 0;
  for (const auto& [name, param_class] : parameters) {
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

// Whole on every tp rank, and used token by token.
bool is_used_by_token(ParamClass param_class) {
  return param_class == ParamClass::kNorm || param_class == ParamClass::kRowBias ||
         param_class == ParamClass::kPosition;
}

}  // namespace

PartialGradSum::PartialGradSum(const std::vector<ParameterSpec>& specs, const ShardPlan& plan,
                               Communicator& tp, bool splits_sequence)
    : tp_(&tp) {
  if (tp.size() == 1) return;
  for (const ParameterSpec& spec : specs) {
    const ParamClass param_class = plan.class_of(spec);
    if (param_class == ParamClass::kKvReplica) kv_parameters_.emplace_back(spec.name, param_class);
    if (param_class == ParamClass::kQkNorm) qk_norms_.emplace_back(spec.name, param_class);
    if (splits_sequence && is_used_by_token(param_class))
      sequence_parameters_.emplace_back(spec.name, param_class);
  }
  if (!kv_parameters_.empty())
    holders_ = tp.split(plan.kv_head_of_rank.at(static_cast<std::size_t>(tp.rank())), tp.rank());
}

PartialGradSum::Over PartialGradSum::over(std::string_view parameter) const noexcept {
  const auto has = [&](const auto& parameters) {
    return std::ranges::any_of(parameters,
                               [&](const auto& entry) { return entry.first == parameter; });
  };
  if (has(kv_parameters_)) return Over::kHolders;
  return has(qk_norms_) || has(sequence_parameters_) ? Over::kTp : Over::kNobody;
}

void PartialGradSum::reduce(const Gradients& gradients) {
  const at::NoGradGuard no_grad;
  if (!kv_parameters_.empty()) sum_over(*holders_, kv_parameters_, gradients);
  if (!qk_norms_.empty()) sum_over(*tp_, qk_norms_, gradients);
  if (!sequence_parameters_.empty()) sum_over(*tp_, sequence_parameters_, gradients);
}

}  // namespace isoshard
