// SPDX-License-Identifier: Apache-2.0
/// Column- and row-parallel linear layers by plan, and the strategy that uses them.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/comm/communicator.h"
#include "subjects/model/strategy.h"
#include "subjects/parallel/tensor/shard_plan.h"
#include "subjects/settings/settings.h"

namespace isoshard {

/// Forward is the identity. Backward returns the sum of the ranks' gradients, in the gradient's
/// dtype (Megatron's f).
///
/// A column-parallel layer's ranks each see their output features only, so each has a part of the
/// input's gradient.
/// Ranks    backward is collective over `tp` (column_parallel.backward; one segment, named
///          `module`).
/// `tp` must outlive the autograd graph.
[[nodiscard]] at::Tensor column_parallel_input(const at::Tensor& x, Communicator& tp,
                                               std::string_view module);

/// Forward returns the sum of the ranks' partial results, in their dtype. Backward is the identity
/// (Megatron's g).
/// Ranks    collective over `tp` (row_parallel.forward; one segment, named `module`).
[[nodiscard]] at::Tensor row_parallel_sum(const at::Tensor& partial, Communicator& tp,
                                          std::string_view module);

/// Whether activations between the regions of tp are whole on every rank, or each has its part of
/// the sequence.
enum class SequenceSplit : std::uint8_t { kWhole, kOverTp };
[[nodiscard]] inline SequenceSplit sequence_split(const TrainSettings& settings) {
  return settings.sequence_parallel ? SequenceSplit::kOverTp : SequenceSplit::kWhole;
}

/// Column layers that read one tensor and whose weights this rank holds as one fused weight, which
/// has `rows` rows of each layer, `turns` times. The strategy's linear gets that fused weight (and
/// bias) for each of the layers.
struct FusedLayers {
  std::vector<std::string> modules;  ///< in the order of use
  std::int64_t turns = 1;
  std::vector<std::int64_t> rows;  ///< by module, of one turn
};

/// A dp x tp rank's strategy: what the plan calls column or row is split over tp, the rest is the
/// unsharded op.
///
/// Column   y_local = f(x) W_local^T + b_local: this rank's output features. Row   y = g(x_local
/// W_local^T) + b: the bias is added once, after the sum. With `record_partials` the summand is
/// tapped as
///          "<module>.partial" with a partial layout (a point the unsharded reference does not
///            have); its gradient is the output's.
/// Vocab   the embedding looks up its own entries and sums over tp; the head gives the logits of
/// its own entries, and the loss is
///          cross_entropy of logits that are split over tp.
/// With the sequence split over tp, f is a gather along the sequence (backward a reduce-scatter), g
/// a reduce-scatter (backward a gather); an embedding that is whole on every rank looks up its part
/// of the indices. Lengths must be multiples of tp.
/// Source   DeepSpeed AutoTP, LinearLayer and LinearAllreduce (module_inject/layers.py): one
///          all-reduce per layer and direction.
class TensorParallelStrategy : public Strategy {
 public:
  /// `dp_rank`: this rank's coordinate on dp, for the layouts of activations that are not equal
  /// shards.
  TensorParallelStrategy(ShardPlan plan, Communicator& tp, int dp_degree,
                         double activation_grad_scale, bool record_partials = false,
                         int dp_rank = 0, SequenceSplit sequence = SequenceSplit::kWhole);
  /// Fuses layers: each group is one product, which is computed when its first layer is called.
  void fuse(std::vector<FusedLayers> groups);
  [[nodiscard]] at::Tensor linear(std::string_view module, const at::Tensor& x,
                                  const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                  Sink* sink) const override;
  [[nodiscard]] at::Tensor embedding(std::string_view module, const at::Tensor& ids_BS,
                                     const at::Tensor& weight, Sink* sink) const override;
  [[nodiscard]] CrossEntropy loss(const at::Tensor& logits, const at::Tensor& targets_BS,
                                  const at::Tensor& weight_B,
                                  double label_smoothing) const override;
  [[nodiscard]] bool splits_output(std::string_view module) const override;
  [[nodiscard]] std::int64_t tokens_of_stream(std::int64_t length) const override;
  [[nodiscard]] int tp_degree() const noexcept override;
  /// Keys and values of a copied kv head are copies; their gradients are partial, as each rank's
  /// query heads give a part.
  [[nodiscard]] ActivationLayouts activation_layouts(std::string_view point,
                                                     const at::Tensor& local,
                                                     int tp_dim) const override;

 private:
  [[nodiscard]] at::Tensor row_linear(std::string_view module, const at::Tensor& x,
                                      const at::Tensor& weight,
                                      const std::optional<at::Tensor>& bias, Sink* sink) const;

  /// The part of a layer in the product of its group.
  [[nodiscard]] at::Tensor fused_linear(const FusedLayers& group, std::string_view module,
                                        const at::Tensor& x, const at::Tensor& weight,
                                        const std::optional<at::Tensor>& bias) const;
  [[nodiscard]] at::Tensor region_input(std::string_view module, const at::Tensor& x,
                                        Purpose purpose) const;
  [[nodiscard]] at::Tensor region_output(std::string_view module, const at::Tensor& partial,
                                         Purpose purpose) const;
  [[nodiscard]] bool is_of_copied_kv_head(std::string_view point) const;
  /// The first `count` entries of this rank's dim `dim`, as a box at `begin` of a dim of size
  /// `whole`.
  [[nodiscard]] Layout box_layout(const at::Tensor& local, int dim, std::int64_t whole,
                                  std::int64_t begin, std::int64_t count) const;

  ShardPlan plan_;
  Communicator* tp_;
  bool record_partials_;
  int dp_rank_;
  bool splits_sequence_;
  std::vector<FusedLayers> fused_;
  /// Of fused layers that have not been asked for yet.
  mutable std::map<std::string, at::Tensor, std::less<>> outputs_;
};

}  // namespace isoshard
