// SPDX-License-Identifier: Apache-2.0
// The two autograd functions of tensor parallelism and the strategy made of them.
#include "parallel/tensor/tensor_parallel_strategy.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <span>
#include <string>
#include <utility>

#include "comm/tensor.h"

namespace isoshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A copy: neither an incoming gradient nor a tensor that autograd knows may be changed in place.
at::Tensor summed(const at::Tensor& part, Communicator& tp, Purpose purpose, const std::string& module) {
  at::Tensor sum = part.clone(at::MemoryFormat::Contiguous);
  const Segment segment{module, ParamClass::kOther, 0, sum.numel()};
  all_reduce(tp, sum, Reduction::kSum, {purpose, Axis::kTp, std::span(&segment, 1)}).wait();
  return sum;
}

// An autograd context keeps integers and strings, so the communicator travels as its address.
std::int64_t to_address(Communicator& tp) { return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(&tp)); }
Communicator& from_address(std::int64_t address) { return *reinterpret_cast<Communicator*>(static_cast<std::intptr_t>(address)); }

class ColumnInput final : public torch::autograd::Function<ColumnInput> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t tp, const std::string& module) {
    context->saved_data["tp"] = tp;
    context->saved_data["module"] = module;
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    Communicator& tp = from_address(context->saved_data["tp"].toInt());
    const std::string module = context->saved_data["module"].toStringRef();
    return {summed(gradients[0], tp, Purpose::kColumnParallelBackward, module), {}, {}};
  }
};

class RowSum final : public torch::autograd::Function<RowSum> {
 public:
  static at::Tensor forward(AutogradContext* /*context*/, const at::Tensor& partial, std::int64_t tp, const std::string& module) {
    return summed(partial, from_address(tp), Purpose::kRowParallelForward, module);
  }
  static variable_list backward(AutogradContext* /*context*/, const variable_list& gradients) { return {gradients[0], {}, {}}; }
};

}  // namespace

at::Tensor column_parallel_input(const at::Tensor& x, Communicator& tp, std::string_view module) {
  return ColumnInput::apply(x, to_address(tp), std::string(module));
}

at::Tensor row_parallel_sum(const at::Tensor& partial, Communicator& tp, std::string_view module) {
  return RowSum::apply(partial, to_address(tp), std::string(module));
}

TensorParallelStrategy::TensorParallelStrategy(ShardPlan plan, Communicator& tp, int dp_degree, double activation_grad_scale,
                                               bool record_partials)
    : Strategy(dp_degree, activation_grad_scale), plan_(std::move(plan)), tp_(&tp), record_partials_(record_partials) {}

at::Tensor TensorParallelStrategy::linear(std::string_view module, const at::Tensor& x, const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias, Sink* sink) const {
  switch (plan_.kind_of_module(module)) {
    case ShardKind::kColumn: return at::linear(column_parallel_input(x, *tp_, module), weight, bias);
    case ShardKind::kRow: return row_linear(module, x, weight, bias, sink);
    case ShardKind::kReplicated: break;
  }
  return Strategy::linear(module, x, weight, bias, sink);
}

at::Tensor TensorParallelStrategy::row_linear(std::string_view module, const at::Tensor& x, const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias, Sink* sink) const {
  at::Tensor local = at::linear(x, weight);
  if (record_partials_) {
    const auto layout = [&] {
      Layout result = activation_layout(local, -1);
      result.placements.push_back(partial(Axis::kTp));
      return result;
    };
    local = tap(sink, std::string(module) + ".partial", local, activation_grad_scale(), layout);
  }
  at::Tensor y = row_parallel_sum(local, *tp_, module);
  return bias.has_value() && bias->defined() ? y + *bias : y;
}

bool TensorParallelStrategy::splits_output(std::string_view module) const { return plan_.kind_of_module(module) == ShardKind::kColumn; }

int TensorParallelStrategy::tp_degree() const noexcept { return tp_->size(); }

}  // namespace isoshard
