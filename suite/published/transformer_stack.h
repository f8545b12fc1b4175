// SPDX-License-Identifier: Apache-2.0
/// Megatron-Core's transformer block without embedding and head, as docs/internals/seeds.md 3
/// measured it: LayerNorm, fused q, k, v, causal softmax attention, output projection, residual,
/// LayerNorm, fc1, gelu, fc2, residual; a LayerNorm at the end. All linear layers have biases,
/// which start as zeros.
///
/// B batch, S sequence, H hidden, N heads, D head dim, F ffn.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "subjects/model/model.h"
#include "subjects/parallel/tensor/shard_plan.h"
#include "suite/published/experiment.h"

namespace isoshard {

/// Layers of one shape, made and run one at a time, so that a rank never holds more than one
/// layer's part.
///
/// Determinism   weights depend on seed, name and index only: N(0, 0.02), the two row-parallel
///               weights N(0, 0.02 / sqrt(2 layers)).
/// Source        Megatron-Core TransformerBlock with TransformerConfig's defaults; q, k and v of a
///               head are neighbors in linear_qkv.
class TransformerStack {
 public:
  /// Parameters and input are on `device`.
  explicit TransformerStack(const ExperimentSettings& settings,
                            c10::Device device = c10::Device(c10::DeviceType::CPU));

  /// The parameters of one layer (12), of the end (2), and all of them in order.
  [[nodiscard]] std::vector<ParameterSpec> layer_parameters(std::int64_t layer) const;
  [[nodiscard]] std::vector<ParameterSpec> final_parameters() const;
  [[nodiscard]] std::vector<ParameterSpec> parameters() const;
  /// linear_qkv and linear_fc1 column-parallel, linear_proj and linear_fc2 row-parallel.
  [[nodiscard]] ShardPlan plan() const;
  /// What tp rank `tp_rank` of `tp` holds of a parameter; with tp 1 all of it.
  [[nodiscard]] at::Tensor read(const ParameterSpec& spec, Dtype dtype, int tp_rank, int tp) const;
  [[nodiscard]] Parameters read_all(const std::vector<ParameterSpec>& specs, Dtype dtype,
                                    int tp_rank, int tp) const;

  /// N(0, 1).   Shapes   [B,S,H].
  [[nodiscard]] at::Tensor input(Dtype dtype) const;
  [[nodiscard]] at::Tensor forward_layer(std::int64_t layer, const Parameters& parameters,
                                         const Strategy& strategy, const at::Tensor& x_BSH) const;
  [[nodiscard]] at::Tensor forward_final(const Parameters& parameters,
                                         const at::Tensor& x_BSH) const;

 private:
  ExperimentSettings settings_;
  std::int64_t head_dim_;
  c10::Device device_;
};

}  // namespace isoshard
