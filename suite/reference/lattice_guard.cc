// SPDX-License-Identifier: Apache-2.0 The lattice model by its formulas in fp64, with the magnitude
// of every sum. Shares no code with the model or its autograd. Legend: T tokens of all samples, B
// samples, S sequence, N heads, K kv heads, D head dim.
#include "suite/reference/lattice_guard.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <map>

#include "core/base/error.h"
#include "fixtures/inputs/inputs.h"
#include "subjects/model/ops/loss.h"

namespace isoshard {
namespace {

int significant_bits(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBFloat16:
      return 8;
    case Dtype::kFloat16:
      return 11;
    case Dtype::kFloat32:
      return 24;
    case Dtype::kFloat64:
      return 53;
    default:
      throw UsageError(
          fmt::format("a lattice case cannot run in {}; use bf16, fp32 or fp64", name_of(dtype)));
  }
}

/// The largest power of two of which every element is a multiple; infinity for zeros.
double unit_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  double unit = std::numeric_limits<double>::infinity();
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    const double value = std::fabs(flat.const_data_ptr<double>()[i]);
    if (value == 0) continue;
    int exponent = 0;
    const auto bits = static_cast<std::uint64_t>(std::ldexp(std::frexp(value, &exponent), 53));
    unit = std::min(unit, std::ldexp(static_cast<double>(bits & (~bits + 1)), exponent - 53));
  }
  return unit;
}

/// A value and a bound of what any rank's part of it may be.
struct Value {
  at::Tensor value, magnitude;
};
Value plain(const at::Tensor& value) {
  return {value, value.abs()};
}

/// Ops that refuse to leave the exact range.
class ExactOps {
 public:
  explicit ExactOps(const Case& c) : dtype_(c.dtype), slug_(c.slug()) {}

  void check(const std::string& op, const at::Tensor& magnitude, double unit) const {
    check_in(op, magnitude, unit, dtype_);
  }
  /// For what is added in another dtype than the case's.
  void check_in(const std::string& op, const at::Tensor& magnitude, double unit,
                Dtype dtype) const {
    if (magnitude.numel() == 0 || !std::isfinite(unit)) return;
    constexpr double kSmallestOfFp16 = 0x1p-24;
    if (dtype == Dtype::kFloat16 && unit < kSmallestOfFp16) {
      throw UsageError(fmt::format(
          "{}: {} adds multiples of {}; the smallest number of fp16 is {}: it is no lattice case",
          slug_, op, unit, kSmallestOfFp16));
    }
    const double units = magnitude.max().item<double>() / unit;
    const double limit = std::ldexp(1.0, significant_bits(dtype));
    if (units <= limit) return;
    throw UsageError(
        fmt::format("{}: {} adds magnitudes up to {} units of {}, but {} holds only {} exactly: it "
                    "is no lattice case. Use a "
                    "shorter sequence, fewer samples, layers or steps, or a wider dtype",
                    slug_, op, units, unit, name_of(dtype), limit));
  }
  [[nodiscard]] Value matmul(const std::string& op, const Value& a, const Value& b) const {
    const at::Tensor magnitude = at::matmul(a.magnitude, b.magnitude);
    check(op, magnitude, unit_of(a.value) * unit_of(b.value));
    return plain(at::matmul(a.value, b.value));
  }
  /// Addends that ranks or autograd may add in any order.
  [[nodiscard]] Value sum(const std::string& op, const std::vector<Value>& addends) const {
    at::Tensor value = at::zeros_like(addends.front().value), magnitude = at::zeros_like(value);
    double unit = std::numeric_limits<double>::infinity();
    for (const Value& addend : addends) {
      value = value + addend.value;
      magnitude = magnitude + addend.magnitude;
      unit = std::min(unit, unit_of(addend.value));
    }
    check(op, magnitude, unit);
    return plain(value);
  }

 private:
  Dtype dtype_;
  std::string slug_;
};

using Tensors = std::map<std::string, at::Tensor>;

/// What backward needs of one layer.
struct LayerValues {
  Value x, q, k, v, scores, core, middle, wide, act;
};

class LatticeStep {
 public:
  LatticeStep(const Case& c, const ExactOps& ops, const Tensors& parameters,
              const at::Tensor& ids_BS, const at::Tensor& labels_BS)
      : config_(c.config),
        dp_(c.degrees.dp),
        ops_(&ops),
        parameters_(&parameters),
        ids_BS_(ids_BS),
        labels_BS_(labels_BS) {}

  Tensors gradients() {
    const at::Tensor ids_T = ids_BS_.flatten();
    embedded_ = plain(parameters_->at("model.embed_tokens.weight").index_select(0, ids_T));
    std::vector<LayerValues> layers;
    Value x = embedded_;
    for (std::int64_t i = 0; i < config_.num_layers; ++i)
      x = layer(fmt::format("model.layers.{}.", i), x, layers);
    (void)linear("lm_head", x);

    const at::Tensor targets_T = shift_labels(labels_BS_).flatten(), counted_T = targets_T != -100;
    at::Tensor cotangent_TV = at::zeros({ids_T.numel(), config_.vocab_size}, at::kDouble);
    cotangent_TV.scatter_(1, targets_T.clamp_min(0).unsqueeze(1),
                          counted_T.to(at::kDouble).mul(-dp_).unsqueeze(1));
    Value dx = linear_backward("lm_head", plain(cotangent_TV), x);
    std::vector<Value> embedded_grads;
    for (std::int64_t i = config_.num_layers; i-- > 0;) {
      dx = layer_backward(fmt::format("model.layers.{}.", i), dx,
                          layers[static_cast<std::size_t>(i)], embedded_grads);
    }
    embedded_grads.push_back(dx);
    const Value d_embedded = ops_->sum("model.embed_tokens gradient", embedded_grads);
    const at::Tensor zero = at::zeros({config_.vocab_size, config_.hidden_size}, at::kDouble);
    ops_->check("model.embed_tokens.weight gradient",
                zero.index_add(0, ids_T, d_embedded.magnitude), unit_of(d_embedded.value));
    gradients_["model.embed_tokens.weight"] = zero.index_add(0, ids_T, d_embedded.value);
    return std::move(gradients_);
  }

 private:
  [[nodiscard]] Value parameter(const std::string& name) const {
    return plain(parameters_->at(name));
  }
  [[nodiscard]] bool has(const std::string& name) const { return parameters_->contains(name); }

  [[nodiscard]] Value linear(const std::string& module, const Value& x) const {
    const Value weight = parameter(module + ".weight");
    const Value product = ops_->matmul(module, x, {weight.value.t(), weight.magnitude.t()});
    return has(module + ".bias") ? ops_->sum(module, {product, parameter(module + ".bias")})
                                 : product;
  }
  /// Keeps the gradients of weight and bias; returns that of x.
  Value linear_backward(const std::string& module, const Value& dy, const Value& x) {
    const Value weight = parameter(module + ".weight");
    gradients_[module + ".weight"] =
        ops_->matmul(module + ".weight gradient", {dy.value.t(), dy.magnitude.t()}, x).value;
    if (has(module + ".bias")) {
      ops_->check(module + ".bias gradient", dy.magnitude.sum(0), unit_of(dy.value));
      gradients_[module + ".bias"] = dy.value.sum(0);
    }
    return ops_->matmul(module + " input gradient", dy, weight);
  }

  /// [T, heads * D] -> [B, N, S, D], kv heads repeated for their query heads; and back, those of a
  /// kv head added.
  [[nodiscard]] at::Tensor to_heads(const at::Tensor& x_TF) const {
    const at::Tensor x_BHSD =
        x_TF.view({ids_BS_.size(0), ids_BS_.size(1), -1, config_.head_dim}).transpose(1, 2);
    return x_BHSD.repeat_interleave(config_.num_heads / x_BHSD.size(1), 1);
  }
  [[nodiscard]] Value to_heads(const Value& x) const {
    return {to_heads(x.value), to_heads(x.magnitude)};
  }
  [[nodiscard]] at::Tensor from_heads(const at::Tensor& x_BNSD, std::int64_t heads) const {
    const at::Tensor grouped = x_BNSD.unflatten(1, {heads, config_.num_heads / heads}).sum(2);
    return grouped.transpose(1, 2).flatten(2).flatten(0, 1);
  }
  [[nodiscard]] Value from_heads(const std::string& op, const Value& x, std::int64_t heads) const {
    const Value result{from_heads(x.value, heads), from_heads(x.magnitude, heads)};
    ops_->check(op, result.magnitude, unit_of(x.value));
    return result;
  }
  static Value transposed(const Value& x) {
    return {x.value.transpose(2, 3), x.magnitude.transpose(2, 3)};
  }
  static Value causal(const Value& x) { return {x.value.tril(), x.magnitude.tril()}; }

  Value layer(const std::string& name, const Value& x, std::vector<LayerValues>& layers) const {
    LayerValues l;
    l.x = x;
    l.q = to_heads(linear(name + "self_attn.q_proj", embedded_));
    l.k = to_heads(linear(name + "self_attn.k_proj", embedded_));
    l.v = to_heads(linear(name + "self_attn.v_proj", x));
    l.scores = causal(ops_->matmul(name + "self_attn scores", l.q, transposed(l.k)));
    l.core = from_heads(name + "self_attn.core",
                        ops_->matmul(name + "self_attn.core", l.scores, l.v), config_.num_heads);
    l.middle =
        ops_->sum(name + "self_attn and residual", {x, linear(name + "self_attn.o_proj", l.core)});
    l.wide = linear(name + "mlp.up_proj", l.middle);
    l.act = plain(l.wide.value.clamp_min(0));
    const Value out =
        ops_->sum(name + "mlp and residual", {l.middle, linear(name + "mlp.down_proj", l.act)});
    layers.push_back(std::move(l));
    return out;
  }

  Value layer_backward(const std::string& name, const Value& dy, const LayerValues& l,
                       std::vector<Value>& embedded_grads) {
    const Value d_act = linear_backward(name + "mlp.down_proj", dy, l.act);
    const Value d_wide =
        plain(at::where(l.wide.value > 0, d_act.value, at::zeros_like(d_act.value)));
    const Value d_mlp = linear_backward(name + "mlp.up_proj", d_wide, l.middle);
    const Value d_middle = ops_->sum(name + "mlp and residual gradient", {dy, d_mlp});

    const Value d_core = to_heads(linear_backward(name + "self_attn.o_proj", d_middle, l.core));
    const Value d_scores =
        causal(ops_->matmul(name + "self_attn scores gradient", d_core, transposed(l.v)));
    const Value d_v = ops_->matmul(name + "self_attn.v gradient", transposed(l.scores), d_core);
    const Value d_q = ops_->matmul(name + "self_attn.q gradient", d_scores, l.k);
    const Value d_k = ops_->matmul(name + "self_attn.k gradient", transposed(d_scores), l.q);
    const auto back = [&](const char* projection, const Value& d_heads, std::int64_t heads,
                          const Value& in) {
      const std::string module = name + "self_attn." + projection;
      return linear_backward(module, from_heads(module + " gradient", d_heads, heads), in);
    };
    embedded_grads.push_back(back("q_proj", d_q, config_.num_heads, embedded_));
    embedded_grads.push_back(back("k_proj", d_k, config_.num_kv_heads, embedded_));
    return ops_->sum(name + "self_attn and residual gradient",
                     {d_middle, back("v_proj", d_v, config_.num_kv_heads, l.x)});
  }

  const ModelConfig& config_;
  double dp_;
  const ExactOps* ops_;
  const Tensors* parameters_;
  at::Tensor ids_BS_, labels_BS_;
  Value embedded_;
  Tensors gradients_;
};

/// The squares of all gradients are added in fp64, shards first.
void check_norm(const Case& c, const ExactOps& ops, const Tensors& gradients) {
  at::Tensor total = at::zeros({}, at::kDouble);
  double unit = std::numeric_limits<double>::infinity();
  for (const auto& [name, summed] : gradients) {
    total = total + (summed / c.degrees.dp).square().sum();
    unit = std::min(unit, std::pow(unit_of(summed / c.degrees.dp), 2));
  }
  ops.check_in("grad_norm", total, unit, Dtype::kFloat64);
}

bool is_power_of_two(double value) {
  int exponent = 0;
  return value > 0 && std::frexp(value, &exponent) == 0.5;
}

void check_settings(const Case& c) {
  const OptimizerSettings& o = c.settings.optimizer;
  std::string problem;
  if (c.settings.loss_mean != LossMean::kSum)
    problem = fmt::format("loss mean {}: use sum", name_of(c.settings.loss_mean));
  if (c.settings.max_grad_norm != 0)
    problem = fmt::format("clipping at {}: use 0, which does not clip", c.settings.max_grad_norm);
  if (o.kind != OptimizerSettings::Kind::kSgd)
    problem = fmt::format("optimizer {}: use sgd", name_of(o.kind));
  if (o.weight_decay != 0) problem = fmt::format("weight decay {}: use 0", o.weight_decay);
  if (!is_power_of_two(o.learning_rate))
    problem = fmt::format("learning rate {}: use a power of two", o.learning_rate);
  if (o.momentum != 0 && !is_power_of_two(o.momentum))
    problem = fmt::format("momentum {}: use 0 or a power of two", o.momentum);
  if (c.settings.label_smoothing != 0)
    problem = fmt::format("label smoothing {}: use 0", c.settings.label_smoothing);
  if (c.settings.autocast.has_value()) problem = "autocast: give the dtype itself";
  if (c.settings.output_dtype.has_value()) problem = "an output dtype: leave it out";
  if (!c.weights_path.empty())
    problem = "weights from a file: leave them out, lattice weights are drawn";
  if (!problem.empty())
    throw UsageError(
        fmt::format("{}: the lattice model is exact only without {}", c.slug(), problem));
}

/// w - rate x buffer, with buffer = momentum x buffer + gradient.
void update(const Case& c, const ExactOps& ops, const Tensors& gradients, Tensors& parameters,
            Tensors& buffers) {
  const OptimizerSettings& o = c.settings.optimizer;
  for (const auto& [name, summed] : gradients) {
    const Value gradient = plain(summed / c.degrees.dp);
    Value buffer = gradient;
    if (o.momentum != 0 && buffers.contains(name)) {
      buffer = ops.sum(name + " momentum", {plain(buffers.at(name) * o.momentum), gradient});
    }
    buffers[name] = buffer.value;
    const Value moved = ops.sum(name + " after the step", {plain(parameters.at(name)),
                                                           plain(buffer.value * -o.learning_rate)});
    parameters[name] = moved.value;
  }
}

}  // namespace

bool is_lattice(const Case& c) noexcept {
  return c.config.model_type == "lattice";
}

void require_exact(const Case& c) {
  if (!is_lattice(c)) return;
  const at::NoGradGuard no_grad;
  check_settings(c);
  const ExactOps ops(c);
  const CaseData data(c);
  const auto weights = case_weights(c);
  Tensors parameters, buffers;
  for (const ParameterSpec& spec : make_model(c.config, c.attention)->parameters()) {
    parameters[spec.name] =
        weights->read(spec, Shape(spec.shape.size(), 0), spec.shape).to(at::kDouble);
  }
  for (int step = c.first_step(); step < c.steps; ++step) {
    std::vector<at::Tensor> ids, labels;
    for (const TokenBatch& batch : data.global_batches(step)) {
      ids.push_back(batch.input_ids_BS);
      labels.push_back(batch.labels_BS);
    }
    const Tensors gradients =
        LatticeStep(c, ops, parameters, at::cat(ids), at::cat(labels)).gradients();
    check_norm(c, ops, gradients);
    update(c, ops, gradients, parameters, buffers);
  }
}

}  // namespace isoshard
