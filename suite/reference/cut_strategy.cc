// SPDX-License-Identifier: Apache-2.0
// Autograd differentiates the pieces of products, so gradients are computed in pieces, too.
#include "suite/reference/cut_strategy.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "subjects/model/ops/linear.h"
#include "subjects/model/ops/ops.h"

namespace isoshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::vector<std::int64_t> equal_cuts(std::int64_t size, std::int64_t pieces) {
  pieces = std::min(pieces, size);
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i <= pieces; ++i) result.push_back(i * size / pieces);
  return result;
}

std::vector<at::Tensor> pieces_of(const at::Tensor& whole, std::int64_t dim,
                                  const std::vector<std::int64_t>& cuts) {
  std::vector<at::Tensor> pieces;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i)
    pieces.push_back(whole.slice(dim, cuts[i], cuts[i + 1]));
  return pieces;
}

// x w^T, rounded once to 16 bits, as are the gradients of both. The library makes a 16-bit kernel
// for each shape that it has not seen, and every cut has shapes of its own: of small products the
// kernels take many times as long as the products. In fp32 there is one for all shapes.
at::Tensor product_of(const at::Tensor& x, const at::Tensor& weight) {
  constexpr std::int64_t kSmall = std::int64_t{1} << 23;  // products of two numbers
  const at::ScalarType type = x.scalar_type();
  const bool is_small = x.size(0) * x.size(1) * weight.size(0) <= kSmall;
  if (!is_small || x.element_size() != 2 || weight.scalar_type() != type)
    return apply_linear(x, weight);
  return apply_linear(x.to(at::kFloat), weight.to(at::kFloat)).to(type);
}

// Softmax attention without a division: weights are exp(score - logarithm of the sum), and their
// sum is 1 but for the roundings of both. Backward takes the sum of weights times their gradients
// from the output. Half of the keys at a time, as two cp ranks would have them. Shapes   all
// [B,N,S,D]
class LogarithmicAttention final : public torch::autograd::Function<LogarithmicAttention> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v) {
    at::Tensor lse, out;
    const std::vector<std::int64_t> halves = equal_cuts(k.size(2), 2);
    for (const at::Tensor& scores : pieces_of(scores_of(q, k), 3, halves)) {
      const at::Tensor own = at::logsumexp(scores, -1, /*keepdim=*/true);
      lse = lse.defined() ? at::logaddexp(lse, own) : own;
    }
    const std::vector<at::Tensor> weights = pieces_of((scores_of(q, k) - lse).exp(), 3, halves);
    const std::vector<at::Tensor> values = pieces_of(v, 2, halves);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor own = at::matmul(weights[i], values[i]);
      out = out.defined() ? out + own : own;
    }
    context->save_for_backward({q, k, v, lse, out});
    return out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &lse = saved[3], &out = saved[4];
    const at::Tensor weights = (scores_of(q, k) - lse).exp();
    const at::Tensor along = (gradients[0] * out).sum(-1, /*keepdim=*/true);
    const at::Tensor of_scores =
        weights * (at::matmul(gradients[0], v.transpose(2, 3)) - along) * scaling_of(q);
    return {at::matmul(of_scores, k), at::matmul(of_scores.transpose(2, 3), q),
            at::matmul(weights.transpose(2, 3), gradients[0])};
  }

 private:
  static double scaling_of(const at::Tensor& q) {
    return 1 / std::sqrt(static_cast<double>(q.size(3)));
  }
  static at::Tensor scores_of(const at::Tensor& q, const at::Tensor& k) {
    const at::Tensor later = at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).triu(1);
    return (at::matmul(q, k.transpose(2, 3)) * scaling_of(q))
        .masked_fill(later, -std::numeric_limits<double>::infinity());
  }
};

}  // namespace

at::Tensor CutStrategy::linear(std::string_view module, const at::Tensor& x,
                               const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                               Sink* /*sink*/) const {
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  const std::vector<std::int64_t> outputs = cuts(module, CutDim::kOutputs, weight.size(0));
  const std::vector<std::int64_t> inputs = cuts(module, CutDim::kInputs, weight.size(1));
  const std::vector<std::size_t> order_of_sum = order(module, inputs.size() - 1);
  std::vector<at::Tensor> products;
  for (const at::Tensor& some_rows :
       pieces_of(rows, 0, cuts(module, CutDim::kTokens, rows.size(0)))) {
    const std::vector<at::Tensor> x_pieces = pieces_of(some_rows, 1, inputs);
    std::vector<at::Tensor> columns;
    for (const at::Tensor& some_outputs : pieces_of(weight, 0, outputs)) {
      const std::vector<at::Tensor> w_pieces = pieces_of(some_outputs, 1, inputs);
      at::Tensor sum;
      for (const std::size_t i : order_of_sum) {
        const at::Tensor product = product_of(x_pieces[i], w_pieces[i]);
        sum = sum.defined() ? sum + product : product;
      }
      columns.push_back(sum);
    }
    products.push_back(at::cat(columns, 1));
  }
  at::Tensor result = at::cat(products, 0);
  if (bias.has_value() && bias->defined()) result = result + bias->to(result.scalar_type());
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0);
  return result.reshape(shape);
}

at::Tensor CutStrategy::embedding(std::string_view module, const at::Tensor& ids_BS,
                                  const at::Tensor& weight, Sink* /*sink*/) const {
  const at::Tensor ids = ids_BS.reshape({-1});
  std::vector<at::Tensor> found;
  for (const at::Tensor& some : pieces_of(ids, 0, cuts(module, CutDim::kTokens, ids.size(0))))
    found.push_back(at::embedding(weight, some));
  std::vector<std::int64_t> shape = ids_BS.sizes().vec();
  shape.push_back(weight.size(1));
  return at::cat(found, 0).reshape(shape);
}

std::vector<std::int64_t> EqualPieces::cuts(std::string_view /*module*/, CutDim dim,
                                            std::int64_t size) const {
  switch (dim) {
    case CutDim::kTokens:
      return equal_cuts(size, kTokenPieces);
    case CutDim::kOutputs:
      return equal_cuts(size, kOutputPieces);
    case CutDim::kInputs:
      break;
  }
  return {0, size};
}

std::vector<std::size_t> EqualPieces::order(std::string_view /*module*/, std::size_t pieces) const {
  std::vector<std::size_t> result(pieces);
  std::iota(result.begin(), result.end(), std::size_t{0});
  return result;
}

at::Tensor EqualPieces::attention(std::string_view module, const at::Tensor& q_BNSD,
                                  const at::Tensor& k_BKSD, const at::Tensor& v_BKSD,
                                  AttentionImpl impl, SoftmaxDtype softmax,
                                  const AttentionDropout& dropout) const {
  const std::int64_t heads = q_BNSD.size(1), length = q_BNSD.size(2);
  if (dropout || q_BNSD.size(0) * heads * length * length > kMostHeld)
    return Strategy::attention(module, q_BNSD, k_BKSD, v_BKSD, impl, softmax, dropout);
  const std::int64_t groups = heads / k_BKSD.size(1);
  return LogarithmicAttention::apply(q_BNSD, repeat_kv(k_BKSD, groups), repeat_kv(v_BKSD, groups))
      .transpose(1, 2)
      .contiguous()
      .flatten(2);
}

// Where torch takes exp(logit - logarithm of the sum), whose rounding is one of the difference, and
// which no small change of the logits draws anew.
CrossEntropy EqualPieces::loss(const at::Tensor& logits, const at::Tensor& targets_BS,
                               const at::Tensor& weight_B, double label_smoothing) const {
  if (logits.numel() > kMostHeld)
    return Strategy::loss(logits, targets_BS, weight_B, label_smoothing);
  const auto vocabulary = static_cast<double>(logits.size(2));
  const at::Tensor uncounted = targets_BS == -100;
  const at::Tensor wide = logits.to(logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor shifted = wide - wide.detach().amax(-1, /*keepdim=*/true);
  const at::Tensor log_sum = shifted.exp().sum(-1).log();
  const at::Tensor of_target =
      shifted.gather(2, targets_BS.masked_fill(uncounted, 0).unsqueeze(2)).squeeze(2);
  at::Tensor losses = log_sum - of_target;
  if (label_smoothing != 0) {
    const double share = label_smoothing * vocabulary / (vocabulary - 1);
    losses = losses * (1 - share) + (log_sum - shifted.mean(-1)) * share;
  }
  const at::Tensor sums_B = losses.masked_fill(uncounted, 0).to(at::kDouble).sum(1);
  return {(weight_B * sums_B).sum().to(wide.scalar_type()), sums_B.detach(),
          uncounted.logical_not().sum(1)};
}

}  // namespace isoshard
