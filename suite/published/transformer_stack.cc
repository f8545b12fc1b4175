// SPDX-License-Identifier: Apache-2.0
// The transformer block of the init and growth experiments.
#include "suite/published/transformer_stack.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>

#include "core/comm/tensor.h"
#include "core/mesh/mesh.h"
#include "subjects/model/ops/ops.h"
#include "subjects/model/weights.h"
#include "subjects/model/zoo/blocks.h"
#include "suite/published/drawn.h"

namespace isoshard {
namespace {

constexpr double kNormEps = 1e-5, kInitStd = 0.02;
constexpr std::string_view kFinalNorm = "decoder.final_layernorm";

std::string module_of(std::int64_t layer, std::string_view name) {
  return fmt::format("decoder.layers.{}.{}", layer, name);
}

void add(std::vector<ParameterSpec>& specs, const std::string& module, Shape shape, ParamInit init,
         TpRole role = TpRole::kReplicated) {
  ParameterSpec weight, bias;
  if (role != TpRole::kReplicated) weight.tp = {role, role == TpRole::kRow ? 1 : 0};
  if (role == TpRole::kColumn) bias.tp = {role, 0};
  weight.name = module + ".weight";
  bias.name = module + ".bias";
  bias.shape = {shape.front()};
  bias.init = ParamInit::kZeros;
  weight.shape = std::move(shape);
  weight.init = init;
  specs.push_back(std::move(weight));
  specs.push_back(std::move(bias));
}

// One head of one sample at a time: 3 x S x S numbers instead of 3 x B x N x S x S.
at::Tensor attention_by_heads(const at::Tensor& q_BNSD, const at::Tensor& k_BNSD,
                              const at::Tensor& v_BNSD) {
  const std::int64_t batch = q_BNSD.size(0), heads = q_BNSD.size(1), length = q_BNSD.size(2),
                     dim = q_BNSD.size(3);
  at::Tensor core_BSN = at::empty({batch, length, heads * dim}, q_BNSD.options());
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t n = 0; n < heads; ++n) {
      const auto one = [&](const at::Tensor& x) { return x.narrow(0, b, 1).narrow(1, n, 1); };
      core_BSN.narrow(0, b, 1)
          .narrow(2, n * dim, dim)
          .copy_(causal_attention(one(q_BNSD), one(k_BNSD), one(v_BNSD), AttentionImpl::kEager));
    }
  }
  return core_BSN;
}

}  // namespace

TransformerStack::TransformerStack(const ExperimentSettings& settings, c10::Device device)
    : settings_(settings), head_dim_(settings.hidden_size / settings.num_heads), device_(device) {}

std::vector<ParameterSpec> TransformerStack::layer_parameters(std::int64_t layer) const {
  const std::int64_t hidden = settings_.hidden_size, ffn = settings_.ffn_size;
  std::vector<ParameterSpec> specs;
  add(specs, module_of(layer, "input_layernorm"), {hidden}, ParamInit::kOnes);
  add(specs, module_of(layer, "self_attention.linear_qkv"), {3 * hidden, hidden},
      ParamInit::kNormal, TpRole::kColumn);
  add(specs, module_of(layer, "self_attention.linear_proj"), {hidden, hidden}, ParamInit::kNormal,
      TpRole::kRow);
  add(specs, module_of(layer, "pre_mlp_layernorm"), {hidden}, ParamInit::kOnes);
  add(specs, module_of(layer, "mlp.linear_fc1"), {ffn, hidden}, ParamInit::kNormal,
      TpRole::kColumn);
  add(specs, module_of(layer, "mlp.linear_fc2"), {hidden, ffn}, ParamInit::kNormal, TpRole::kRow);
  return specs;
}

std::vector<ParameterSpec> TransformerStack::final_parameters() const {
  std::vector<ParameterSpec> specs;
  add(specs, std::string(kFinalNorm), {settings_.hidden_size}, ParamInit::kOnes);
  return specs;
}

std::vector<ParameterSpec> TransformerStack::parameters() const {
  std::vector<ParameterSpec> specs;
  for (std::int64_t layer = 0; layer < settings_.layers; ++layer) {
    for (ParameterSpec& spec : layer_parameters(layer)) specs.push_back(std::move(spec));
  }
  for (ParameterSpec& spec : final_parameters()) specs.push_back(std::move(spec));
  return specs;
}

ShardPlan TransformerStack::plan() const {
  ShardPlan plan;
  for (const ParameterSpec& spec : parameters()) {
    if (spec.tp.role == TpRole::kColumn) plan.kinds[spec.name] = ShardKind::kColumn;
    if (spec.tp.role == TpRole::kRow) plan.kinds[spec.name] = ShardKind::kRow;
  }
  return plan;
}

at::Tensor TransformerStack::read(const ParameterSpec& spec, Dtype dtype, int tp_rank,
                                  int tp) const {
  Shape offset(spec.shape.size(), 0), size = spec.shape;
  if (spec.tp.dim >= 0) {
    const auto dim = static_cast<std::size_t>(spec.tp.dim);
    size[dim] /= tp;
    offset[dim] = tp_rank * size[dim];
  }
  // Megatron's scaled_init_method_normal for the layers that write to the residual stream.
  const double std = spec.tp.role == TpRole::kRow
                         ? kInitStd / std::sqrt(2.0 * static_cast<double>(settings_.layers))
                         : kInitStd;
  return InitialWeights(settings_.seed, std, false)
      .read(spec, offset, size)
      .to(scalar_type_of(dtype))
      .to(device_);
}

Parameters TransformerStack::read_all(const std::vector<ParameterSpec>& specs, Dtype dtype,
                                      int tp_rank, int tp) const {
  Parameters parameters;
  for (const ParameterSpec& spec : specs) parameters[spec.name] = read(spec, dtype, tp_rank, tp);
  return parameters;
}

at::Tensor TransformerStack::input(Dtype dtype) const {
  return Drawn{"hidden_states",
               {settings_.batch_size, settings_.seq_length, settings_.hidden_size},
               1.0,
               settings_.seed,
               device_}
      .whole(dtype);
}

at::Tensor TransformerStack::forward_layer(std::int64_t layer, const Parameters& parameters,
                                           const Strategy& strategy,
                                           const at::Tensor& x_BSH) const {
  const ForwardPass pass(parameters, strategy, nullptr);
  const auto norm = [&](std::string_view name, const at::Tensor& x) {
    const std::string module = module_of(layer, name);
    return layer_norm(x, pass.parameter(module + ".weight"), pass.parameter(module + ".bias"),
                      kNormEps);
  };
  const auto linear = [&](std::string_view name, const at::Tensor& x) {
    return pass.linear(module_of(layer, name), x, /*has_bias=*/true);
  };

  const at::Tensor qkv = linear("self_attention.linear_qkv", norm("input_layernorm", x_BSH));
  // [B,S,N*3*D] -> three [B,N,S,D]; a rank has its own heads.
  const std::vector<at::Tensor> parts =
      qkv.unflatten(-1, {qkv.size(-1) / (3 * head_dim_), 3, head_dim_})
          .permute({3, 0, 2, 1, 4})
          .unbind(0);
  const at::Tensor middle = x_BSH + linear("self_attention.linear_proj",
                                           attention_by_heads(parts[0], parts[1], parts[2]));
  const at::Tensor wide = at::gelu(linear("mlp.linear_fc1", norm("pre_mlp_layernorm", middle)));
  return middle + linear("mlp.linear_fc2", wide);
}

at::Tensor TransformerStack::forward_final(const Parameters& parameters,
                                           const at::Tensor& x_BSH) const {
  const std::string module(kFinalNorm);
  return layer_norm(x_BSH, parameters.at(module + ".weight"), parameters.at(module + ".bias"),
                    kNormEps);
}

}  // namespace isoshard
