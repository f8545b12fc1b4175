// SPDX-License-Identifier: Apache-2.0
// Cross-entropy in blocks of rows, as one autograd function.
//
// A row is one token: its log-softmax is computed from its own logits alone, so that neither value nor gradient of a row
// depends on how many others there are or on how rows are cut into blocks. Backward recomputes the log-softmax of a block
// from the logits, so that nothing of the logits' size is kept in fp32. Sums over rows are fp64.
#include "model/loss.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/error.h"

namespace isoshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr std::int64_t kIgnored = -100;
constexpr std::int64_t kBlockElements = std::int64_t{1} << 22;

at::ScalarType wide_type_of(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Calls `visit(first row, number of rows)` for blocks of at most kBlockElements logits.
template <class Visit>
void for_each_block(const at::Tensor& logits_RV, Visit visit) {
  const std::int64_t rows = logits_RV.size(0);
  const std::int64_t block = std::max<std::int64_t>(1, kBlockElements / std::max<std::int64_t>(1, logits_RV.size(1)));
  for (std::int64_t first = 0; first < rows; first += block) visit(first, std::min(block, rows - first));
}

/// Losses of all rows, 0 where the target is not counted. Shapes   logits [R,V], targets [R] -> [R] in fp32 or fp64.
at::Tensor row_losses(const at::Tensor& logits_RV, const at::Tensor& targets_R) {
  at::Tensor losses_R = at::empty({logits_RV.size(0)}, logits_RV.options().dtype(wide_type_of(logits_RV)));
  for_each_block(logits_RV, [&](std::int64_t first, std::int64_t rows) {
    const at::Tensor targets = targets_R.narrow(0, first, rows);
    const at::Tensor log_p = at::log_softmax(logits_RV.narrow(0, first, rows), -1, wide_type_of(logits_RV));
    const at::Tensor picked = log_p.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1).neg();
    losses_R.narrow(0, first, rows).copy_(at::where(targets == kIgnored, at::zeros_like(picked), picked));
  });
  return losses_R;
}

/// d(sum over rows of scale[r] * loss[r]) / d logits, in the logits' dtype.
at::Tensor row_gradients(const at::Tensor& logits_RV, const at::Tensor& targets_R, const at::Tensor& scale_R) {
  at::Tensor gradient_RV = at::empty(logits_RV.sizes(), logits_RV.options());
  for_each_block(logits_RV, [&](std::int64_t first, std::int64_t rows) {
    const at::Tensor targets = targets_R.narrow(0, first, rows);
    const at::Tensor log_p = at::log_softmax(logits_RV.narrow(0, first, rows), -1, wide_type_of(logits_RV));
    const at::Tensor counted =
        at::where(targets == kIgnored, at::zeros_like(scale_R.narrow(0, first, rows)), scale_R.narrow(0, first, rows));
    at::Tensor wide = at::zeros_like(log_p).scatter_(1, targets.clamp_min(0).unsqueeze(1), counted.neg().unsqueeze(1));
    wide = at::_log_softmax_backward_data(wide, log_p, -1, log_p.scalar_type());
    gradient_RV.narrow(0, first, rows).copy_(wide);
  });
  return gradient_RV;
}

class CrossEntropyFunction : public torch::autograd::Function<CrossEntropyFunction> {
 public:
  /// Returns the weighted sum and, not differentiable, the sums per sample in fp64.
  static variable_list forward(AutogradContext* context, const at::Tensor& logits_BSV, const at::Tensor& targets_BS,
                               const at::Tensor& weight_B) {
    context->save_for_backward({logits_BSV, targets_BS, weight_B});
    const at::Tensor losses_BS = row_losses(logits_BSV.flatten(0, 1), targets_BS.flatten()).view(targets_BS.sizes());
    const at::Tensor sums_B = losses_BS.to(at::kDouble).sum(1);
    context->mark_non_differentiable({sums_B});
    return {(weight_B * sums_B).sum().to(losses_BS.scalar_type()), sums_B};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &logits_BSV = saved[0], &targets_BS = saved[1], &weight_B = saved[2];
    const at::Tensor scale_B = (weight_B * gradients[0].to(at::kDouble)).to(wide_type_of(logits_BSV));
    const at::Tensor scale_R = scale_B.unsqueeze(1).expand(targets_BS.sizes()).flatten();
    const at::Tensor gradient = row_gradients(logits_BSV.flatten(0, 1), targets_BS.flatten(), scale_R);
    return {gradient.view(logits_BSV.sizes()), Variable(), Variable()};
  }
};

void check_arguments(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& weight) {
  if (logits.dim() != 3 || !logits.is_floating_point()) {
    throw ShapeError(fmt::format("logits are {} [{}]: expected floating-point [batch, sequence, vocabulary]",
                                 at::toString(logits.scalar_type()), fmt::join(logits.sizes(), ", ")));
  }
  if (targets.scalar_type() != at::kLong || targets.sizes() != logits.sizes().slice(0, 2)) {
    throw ShapeError(fmt::format("targets are {} [{}]: expected int64 [{}, {}]", at::toString(targets.scalar_type()),
                                 fmt::join(targets.sizes(), ", "), logits.size(0), logits.size(1)));
  }
  if (weight.scalar_type() != at::kDouble || weight.dim() != 1 || weight.size(0) != logits.size(0)) {
    throw ShapeError(fmt::format("weights are {} [{}]: expected fp64 [{}]", at::toString(weight.scalar_type()),
                                 fmt::join(weight.sizes(), ", "), logits.size(0)));
  }
  const at::Tensor wrong = (targets != kIgnored) & ((targets < 0) | (targets >= logits.size(2)));
  if (wrong.any().item<bool>()) {
    throw ShapeError(fmt::format("target {} is outside the vocabulary of {} (not counted is {})",
                                 targets.masked_select(wrong)[0].item<std::int64_t>(), logits.size(2), kIgnored));
  }
}

}  // namespace

at::Tensor shift_labels(const at::Tensor& labels_BS) {
  const at::NoGradGuard no_grad;
  return at::constant_pad_nd(labels_BS.slice(1, 1), {0, 1}, kIgnored);
}

CrossEntropy cross_entropy(const at::Tensor& logits_BSV, const at::Tensor& targets_BS, const at::Tensor& weight_B) {
  check_arguments(logits_BSV, targets_BS, weight_B);
  const variable_list results = CrossEntropyFunction::apply(logits_BSV, targets_BS, weight_B);
  return {results[0], results[1].detach(), (targets_BS != kIgnored).sum(1)};
}

}  // namespace isoshard
