// SPDX-License-Identifier: Apache-2.0
// Gather and reduce-scatter along dim 1.
#include "subjects/parallel/tensor/sequence.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <span>
#include <string>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "subjects/parallel/tensor/communicator_address.h"

namespace isoshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::int64_t part_of(const at::Tensor& whole, const Communicator& tp) {
  const std::int64_t length = whole.size(1), degree = tp.size();
  if (length % degree != 0)
    throw ShapeError(fmt::format(
        "the sequence length must be divisible by the tp degree {}, got {}", degree, length));
  return length / degree;
}

// Collectives gather and scatter along dim 0: parts travel as [tp, B, S / tp, ...].
at::Tensor gathered(const at::Tensor& own, Communicator& tp, const std::string& module) {
  const Segment segment{module, ParamClass::kOther, 0, own.numel()};
  const CallInfo info{Purpose::kSequenceGather, Axis::kTp, std::span(&segment, 1)};
  return all_gather(tp, own.contiguous().unsqueeze(0), info)
      .transpose(0, 1)
      .flatten(1, 2)
      .contiguous();
}

at::Tensor scattered_sum(const at::Tensor& whole, Communicator& tp, const std::string& module) {
  const at::Tensor parts =
      whole.unflatten(1, {tp.size(), part_of(whole, tp)}).transpose(0, 1).contiguous();
  const Segment segment{module, ParamClass::kOther, 0, parts.numel()};
  return reduce_scatter(tp, parts, Reduction::kSum,
                        {Purpose::kSequenceScatter, Axis::kTp, std::span(&segment, 1)})
      .select(0, 0);
}

class GatheredSequence final : public torch::autograd::Function<GatheredSequence> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& own, std::int64_t tp,
                            const std::string& module) {
    context->saved_data["tp"] = tp;
    context->saved_data["module"] = module;
    return gathered(own, from_address(tp), module);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    Communicator& tp = from_address(context->saved_data["tp"].toInt());
    return {scattered_sum(gradients[0], tp, context->saved_data["module"].toStringRef()), {}, {}};
  }
};

class ScatteredSum final : public torch::autograd::Function<ScatteredSum> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& partial, std::int64_t tp,
                            const std::string& module) {
    context->saved_data["tp"] = tp;
    context->saved_data["module"] = module;
    return scattered_sum(partial, from_address(tp), module);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    Communicator& tp = from_address(context->saved_data["tp"].toInt());
    return {gathered(gradients[0], tp, context->saved_data["module"].toStringRef()), {}, {}};
  }
};

}  // namespace

at::Tensor gathered_sequence(const at::Tensor& own, Communicator& tp, std::string_view module) {
  return GatheredSequence::apply(own, to_address(tp), std::string(module));
}

at::Tensor scattered_sequence_sum(const at::Tensor& partial, Communicator& tp,
                                  std::string_view module) {
  return ScatteredSum::apply(partial, to_address(tp), std::string(module));
}

at::Tensor own_part_of_sequence(const at::Tensor& whole, const Communicator& tp) {
  const std::int64_t part = part_of(whole, tp);
  return whole.narrow(1, tp.rank() * part, part).contiguous();
}

}  // namespace isoshard
