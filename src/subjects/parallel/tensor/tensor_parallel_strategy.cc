// SPDX-License-Identifier: Apache-2.0
// The two autograd functions of tensor parallelism and the strategy made of them.
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "core/observe/record_name.h"
#include "subjects/model/ops/linear.h"
#include "subjects/parallel/tensor/communicator_address.h"
#include "subjects/parallel/tensor/sequence.h"

namespace isoshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A copy: neither an incoming gradient nor a tensor that autograd knows may be changed in place.
at::Tensor summed(const at::Tensor& part, Communicator& tp, Purpose purpose,
                  const std::string& module) {
  at::Tensor sum = part.clone(at::MemoryFormat::Contiguous);
  const Segment segment{module, ParamClass::kOther, 0, sum.numel()};
  all_reduce(tp, sum, Reduction::kSum, {purpose, Axis::kTp, std::span(&segment, 1)}).wait();
  return sum;
}

class ColumnInput final : public torch::autograd::Function<ColumnInput> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, std::int64_t tp,
                            const std::string& module, std::int64_t purpose) {
    context->saved_data["purpose"] = purpose;
    context->saved_data["tp"] = tp;
    context->saved_data["module"] = module;
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    Communicator& tp = from_address(context->saved_data["tp"].toInt());
    const std::string module = context->saved_data["module"].toStringRef();
    return {summed(gradients[0], tp, static_cast<Purpose>(context->saved_data["purpose"].toInt()),
                   module),
            {},
            {},
            {}};
  }
};

class RowSum final : public torch::autograd::Function<RowSum> {
 public:
  static at::Tensor forward(AutogradContext* /*context*/, const at::Tensor& partial,
                            std::int64_t tp, const std::string& module, std::int64_t purpose) {
    return summed(partial, from_address(tp), static_cast<Purpose>(purpose), module);
  }
  static variable_list backward(AutogradContext* /*context*/, const variable_list& gradients) {
    return {gradients[0], {}, {}, {}};
  }
};

}  // namespace

at::Tensor column_parallel_input(const at::Tensor& x, Communicator& tp, std::string_view module) {
  return ColumnInput::apply(x, to_address(tp), std::string(module),
                            static_cast<std::int64_t>(Purpose::kColumnParallelBackward));
}

at::Tensor row_parallel_sum(const at::Tensor& partial, Communicator& tp, std::string_view module) {
  return RowSum::apply(partial, to_address(tp), std::string(module),
                       static_cast<std::int64_t>(Purpose::kRowParallelForward));
}

TensorParallelStrategy::TensorParallelStrategy(ShardPlan plan, Communicator& tp, int dp_degree,
                                               double activation_grad_scale, bool record_partials,
                                               int dp_rank, SequenceSplit sequence)
    : Strategy(dp_degree, activation_grad_scale),
      plan_(std::move(plan)),
      tp_(&tp),
      record_partials_(record_partials),
      dp_rank_(dp_rank),
      splits_sequence_(sequence == SequenceSplit::kOverTp && tp.size() > 1) {}

at::Tensor TensorParallelStrategy::region_input(std::string_view module, const at::Tensor& x,
                                                Purpose purpose) const {
  if (splits_sequence_) return gathered_sequence(x, *tp_, module);
  return ColumnInput::apply(x, to_address(*tp_), std::string(module),
                            static_cast<std::int64_t>(purpose));
}

at::Tensor TensorParallelStrategy::region_output(std::string_view module, const at::Tensor& partial,
                                                 Purpose purpose) const {
  if (splits_sequence_) return scattered_sequence_sum(partial, *tp_, module);
  return RowSum::apply(partial, to_address(*tp_), std::string(module),
                       static_cast<std::int64_t>(purpose));
}

void TensorParallelStrategy::fuse(std::vector<FusedLayers> groups) {
  fused_ = std::move(groups);
}

at::Tensor TensorParallelStrategy::fused_linear(const FusedLayers& group, std::string_view module,
                                                const at::Tensor& x, const at::Tensor& weight,
                                                const std::optional<at::Tensor>& bias) const {
  if (module == group.modules.front()) {
    const at::Tensor all =
        apply_linear(region_input(module, x, Purpose::kColumnParallelBackward), weight, bias);
    const std::vector<at::Tensor> parts =
        all.unflatten(-1, {group.turns, -1}).split_with_sizes(group.rows, -1);
    for (std::size_t m = 0; m < parts.size(); ++m)
      outputs_[group.modules[m]] = parts[m].flatten(-2).contiguous();
  }
  const auto own = outputs_.find(module);
  if (own == outputs_.end())
    throw ShapeError(
        fmt::format("{} must not be computed before {}", module, group.modules.front()));
  at::Tensor output = std::move(own->second);
  outputs_.erase(own);
  return output;
}

at::Tensor TensorParallelStrategy::linear(std::string_view module, const at::Tensor& x,
                                          const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias, Sink* sink) const {
  switch (plan_.kind_of_module(module)) {
    case ShardKind::kColumn:
    case ShardKind::kKvReplica:
      for (const FusedLayers& group : fused_) {
        if (std::find(group.modules.begin(), group.modules.end(), module) == group.modules.end())
          continue;
        return fused_linear(group, module, x, weight, bias);
      }
      return apply_linear(region_input(module, x, Purpose::kColumnParallelBackward), weight, bias);
    case ShardKind::kRow:
      return row_linear(module, x, weight, bias, sink);
    case ShardKind::kVocabHead:
      return apply_linear(region_input(module, x, Purpose::kVocabParallelBackward), weight, bias);
    case ShardKind::kVocabEmbedding:
    case ShardKind::kReplicated:
      break;
  }
  return Strategy::linear(module, x, weight, bias, sink);
}

at::Tensor TensorParallelStrategy::embedding(std::string_view module, const at::Tensor& ids_BS,
                                             const at::Tensor& weight, Sink* sink) const {
  if (plan_.kind_of_module(module) != ShardKind::kVocabEmbedding) {
    const at::Tensor own_ids = splits_sequence_ ? own_part_of_sequence(ids_BS, *tp_) : ids_BS;
    return Strategy::embedding(module, own_ids, weight, sink);
  }
  const VocabShard shard = plan_.vocab_shard(tp_->rank());
  const at::Tensor local_ids = ids_BS - shard.begin;
  const at::Tensor elsewhere = (local_ids < 0) | (local_ids >= shard.count);
  const at::Tensor rows = at::embedding(weight, local_ids.masked_fill(elsewhere, 0));
  const at::Tensor own = rows.masked_fill(elsewhere.unsqueeze(-1), 0);
  return region_output(module, own, Purpose::kVocabParallelEmbed);
}

CrossEntropy TensorParallelStrategy::loss(const at::Tensor& logits, const at::Tensor& targets_BS,
                                          const at::Tensor& weight_B,
                                          double label_smoothing) const {
  if (plan_.vocab_size == 0) return Strategy::loss(logits, targets_BS, weight_B, label_smoothing);
  LossOptions options;
  options.label_smoothing = label_smoothing;
  options.tp = tp_;
  options.shard = plan_.vocab_shard(tp_->rank());
  return cross_entropy(logits, targets_BS, weight_B, options);
}

at::Tensor TensorParallelStrategy::row_linear(std::string_view module, const at::Tensor& x,
                                              const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias,
                                              Sink* sink) const {
  at::Tensor local = apply_linear(x, weight);
  if (record_partials_ && sink != nullptr) {
    Layout gradient = over_context(activation_layout(local, -1), local, 1), value = gradient;
    value.placements.push_back(partial(Axis::kTp));
    local = detail::tap_with_sink(*sink, to_string(RecordName{module, NameRole::kSummand}),
                                  std::move(local), activation_grad_scale(), std::move(value),
                                  std::move(gradient));
  }
  at::Tensor y = region_output(module, local, Purpose::kRowParallelForward);
  // Under autocast the bias is wider than the sum: it is rounded first, as at::linear would do.
  return bias.has_value() && bias->defined() ? y + bias->to(y.scalar_type()) : y;
}

bool TensorParallelStrategy::splits_output(std::string_view module) const {
  const ShardKind kind = plan_.kind_of_module(module);
  return kind == ShardKind::kColumn || kind == ShardKind::kKvReplica ||
         kind == ShardKind::kVocabHead;
}

std::int64_t TensorParallelStrategy::tokens_of_stream(std::int64_t length) const {
  return splits_sequence_ ? length * tp_->size() : length;
}

int TensorParallelStrategy::tp_degree() const noexcept {
  return tp_->size();
}

bool TensorParallelStrategy::is_of_copied_kv_head(std::string_view point) const {
  if (plan_.kv_head_of_rank.empty()) return false;
  constexpr std::array<std::string_view, 4> kPoints = {".k_proj", ".v_proj", ".k_norm", ".k_rope"};
  return std::any_of(kPoints.begin(), kPoints.end(),
                     [&](std::string_view suffix) { return point.ends_with(suffix); });
}

Layout TensorParallelStrategy::box_layout(const at::Tensor& local, int dim, std::int64_t whole,
                                          std::int64_t begin, std::int64_t count) const {
  const auto d = static_cast<std::size_t>(dim);
  const Shape shape = local.sizes().vec();
  Layout layout = replicated(shape);
  Box box{Shape(shape.size(), 0), Shape(shape.size(), 0), shape};
  layout.global_shape[0] *= dp_degree();
  layout.global_shape[d] = whole;
  box.global_offset[0] = dp_rank_ * shape[0];
  box.global_offset[d] = begin;
  box.size[d] = count;
  if (count > 0) layout.boxes = {std::move(box)};
  layout.explicit_parts = true;
  return layout;
}

ActivationLayouts TensorParallelStrategy::activation_layouts(std::string_view point,
                                                             const at::Tensor& local,
                                                             int tp_dim) const {
  if (tp_dim < 0 && splits_sequence_) return Strategy::activation_layouts(point, local, 1);
  if (tp_dim >= 0 && plan_.kind_of_module(point) == ShardKind::kVocabHead) {
    const VocabShard shard = plan_.vocab_shard(tp_->rank());
    const Layout layout = box_layout(local, tp_dim, shard.whole, shard.begin, shard.count);
    return {layout, layout};
  }
  if (tp_dim < 0 || !is_of_copied_kv_head(point))
    return Strategy::activation_layouts(point, local, tp_dim);
  const std::int64_t part = local.size(tp_dim);
  const Layout value =
      box_layout(local, tp_dim, part * plan_.num_kv_heads,
                 part * plan_.kv_head_of_rank.at(static_cast<std::size_t>(tp_->rank())), part);
  Layout gradient = value;
  gradient.placements.push_back(partial(Axis::kTp));
  return {value, std::move(gradient)};
}

}  // namespace isoshard
