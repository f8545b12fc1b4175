// SPDX-License-Identifier: Apache-2.0
// Cross-entropy as one autograd function over the losses of rows. Sums over rows are fp64.
#include "subjects/model/ops/loss.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/base/error.h"
#include "subjects/model/ops/loss_rows.h"

namespace isoshard {
namespace {

using detail::kIgnored;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// An autograd context keeps numbers and tensors. Backward talks to nobody: of `tp` it needs only
// whether there is one.
void save_options(AutogradContext& context, const LossOptions& options) {
  context.saved_data["smoothing"] = options.label_smoothing;
  context.saved_data["block_rows"] = options.block_rows;
  context.saved_data["tp"] = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(options.tp));
  context.saved_data["whole"] = options.shard.whole;
  context.saved_data["begin"] = options.shard.begin;
  context.saved_data["count"] = options.shard.count;
  context.saved_data["rows"] = options.shard.rows;
}

LossOptions saved_options(AutogradContext& context) {
  const auto number = [&](const char* name) { return context.saved_data[name].toInt(); };
  LossOptions options;
  options.label_smoothing = context.saved_data["smoothing"].toDouble();
  options.block_rows = number("block_rows");
  options.tp = reinterpret_cast<Communicator*>(static_cast<std::intptr_t>(number("tp")));
  options.shard = {number("whole"), number("begin"), number("count"), number("rows")};
  return options;
}

class CrossEntropyFunction : public torch::autograd::Function<CrossEntropyFunction> {
 public:
  /// Returns the weighted sum and, not differentiable, the sums per sample in fp64.
  static variable_list forward(AutogradContext* context, const at::Tensor& logits_BSV,
                               const at::Tensor& targets_BS, const at::Tensor& weight_B,
                               const LossOptions& options) {
    const detail::RowLosses rows =
        detail::row_losses(logits_BSV.flatten(0, 1), targets_BS.flatten(), options);
    const at::Tensor losses_BS =
        rows.loss_R.view(targets_BS.sizes()).masked_fill(targets_BS == kIgnored, 0);
    const at::Tensor sums_B = losses_BS.to(at::kDouble).sum(1);
    save_options(*context, options);
    context->save_for_backward({logits_BSV, targets_BS, weight_B, rows.max_R, rows.log_sum_R});
    context->mark_non_differentiable({sums_B});
    return {(weight_B * sums_B).sum().to(losses_BS.scalar_type()), sums_B};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &targets_BS = saved[1], &weight_B = saved[2];
    // Detached, it shares the version counter: autograd notices if anything needs the logits after
    // all.
    const at::Tensor logits_RV = saved[0].detach().flatten(0, 1);
    const at::Tensor scale_B =
        (weight_B * gradients[0].to(at::kDouble)).to(detail::wide_type_of(logits_RV));
    const at::Tensor scale_R = scale_B.unsqueeze(1)
                                   .expand(targets_BS.sizes())
                                   .masked_fill(targets_BS == kIgnored, 0)
                                   .flatten();
    detail::write_row_gradients(logits_RV, targets_BS.flatten(), scale_R, {{}, saved[3], saved[4]},
                                saved_options(*context));
    return {logits_RV.view(saved[0].sizes()), Variable(), Variable(), Variable()};
  }
};

void check_arguments(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& weight,
                     const LossOptions& options) {
  if (logits.dim() != 3 || !logits.is_floating_point()) {
    throw ShapeError(
        fmt::format("logits must be floating-point [batch, sequence, vocabulary], got {} [{}]",
                    at::toString(logits.scalar_type()), fmt::join(logits.sizes(), ", ")));
  }
  if (options.tp != nullptr && logits.size(2) != options.shard.rows) {
    throw ShapeError(fmt::format("logits must have the {} columns of this rank's shard, got [{}]",
                                 options.shard.rows, fmt::join(logits.sizes(), ", ")));
  }
  if (targets.scalar_type() != at::kLong || targets.sizes() != logits.sizes().slice(0, 2)) {
    throw ShapeError(fmt::format("targets must be int64 [{}, {}], got {} [{}]", logits.size(0),
                                 logits.size(1), at::toString(targets.scalar_type()),
                                 fmt::join(targets.sizes(), ", ")));
  }
  if (weight.scalar_type() != at::kDouble || weight.dim() != 1 ||
      weight.size(0) != logits.size(0)) {
    throw ShapeError(fmt::format("weights must be fp64 [{}], got {} [{}]", logits.size(0),
                                 at::toString(weight.scalar_type()),
                                 fmt::join(weight.sizes(), ", ")));
  }
  const std::int64_t vocabulary = options.tp != nullptr ? options.shard.whole : logits.size(2);
  const at::Tensor wrong = (targets != kIgnored) & ((targets < 0) | (targets >= vocabulary));
  if (wrong.any().item<bool>()) {
    throw ShapeError(fmt::format(
        "a target must be below the vocabulary size {}, or {} where it is not counted, got {}",
        vocabulary, kIgnored, targets.masked_select(wrong)[0].item<std::int64_t>()));
  }
  if (options.label_smoothing != 0 && vocabulary < 2) {
    throw ShapeError(fmt::format("label smoothing needs a vocabulary of at least 2 entries, got {}",
                                 vocabulary));
  }
}

}  // namespace

at::Tensor shift_labels(const at::Tensor& labels_BS) {
  const at::NoGradGuard no_grad;
  return at::constant_pad_nd(labels_BS.slice(1, 1), {0, 1}, kIgnored);
}

CrossEntropy cross_entropy(const at::Tensor& logits_BSV, const at::Tensor& targets_BS,
                           const at::Tensor& weight_B, const LossOptions& options) {
  check_arguments(logits_BSV, targets_BS, weight_B, options);
  const variable_list results =
      CrossEntropyFunction::apply(logits_BSV, targets_BS, weight_B, options);
  return {results[0], results[1].detach(), (targets_BS != kIgnored).sum(1)};
}

}  // namespace isoshard
