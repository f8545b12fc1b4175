// SPDX-License-Identifier: Apache-2.0
/// The strategy of one emulated rank: linear layers and embeddings as its numerics cut them.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <set>
#include <string>

#include "subjects/model/strategy.h"
#include "subjects/parallel/numerics_spec.h"
#include "suite/emulation/emulated_context.h"
#include "suite/emulation/emulated_world.h"

namespace isoshard {

/// How a module's weights are used over tp.
[[nodiscard]] Region region_of(const TensorNumerics& tensor, std::string_view module);

/// Requires     one object per rank and forward pass at a time; `numerics` and `world` outlive it
///              and the autograd graph.
/// Guarantees   attention is that of the declared cut over cp; column layers send their input's
///              gradient back as their group of shared inputs says; row layers add their partial
///              outputs at `row_output`, then the bias; a cut vocabulary is looked up and
///              multiplied by each rank's entries.
/// Ranks        forward and backward are collective over the tp group, and over cp.
class EmulatedStrategy final : public Strategy {
 public:
  /// With `record_partials` the summands of row layers are tapped as "<module>.partial".
  EmulatedStrategy(const NumericsSpec& numerics, EmulatedWorld& world, int rank,
                   bool record_partials);
  [[nodiscard]] at::Tensor linear(std::string_view module, const at::Tensor& x,
                                  const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                  Sink* sink) const override;
  [[nodiscard]] at::Tensor embedding(std::string_view module, const at::Tensor& ids_BS,
                                     const at::Tensor& weight, Sink* sink) const override;
  [[nodiscard]] bool splits_output(std::string_view module) const override;
  [[nodiscard]] int tp_degree() const noexcept override;
  [[nodiscard]] ActivationLayouts activation_layouts(std::string_view point,
                                                     const at::Tensor& local,
                                                     int tp_dim) const override;

  [[nodiscard]] at::Tensor attention(std::string_view module, const at::Tensor& q_BNSD,
                                     const at::Tensor& k_BKSD, const at::Tensor& v_BKSD,
                                     AttentionImpl impl, SoftmaxDtype softmax,
                                     const AttentionDropout& dropout) const override;
  [[nodiscard]] KeysValues whole_context(std::string_view module, const at::Tensor& k_BKSD,
                                         const at::Tensor& v_BKSD) const override;
  [[nodiscard]] at::Tensor token_positions(std::int64_t length) const override;
  [[nodiscard]] std::int64_t sequence_length(std::int64_t length) const override;
  [[nodiscard]] std::int64_t tokens_of_stream(std::int64_t length) const override;
  [[nodiscard]] Layout over_context(Layout layout, const at::Tensor& local,
                                    int sequence_dim) const override;
  [[nodiscard]] const EmulatedContext& context() const noexcept { return context_; }

  /// The gradient of a shared input from those that its modules send back, in the order of use.
  [[nodiscard]] at::Tensor input_gradient(std::size_t group,
                                          std::vector<at::Tensor> gradients) const;
  /// The output of a row layer or a cut embedding from this rank's summand.
  [[nodiscard]] at::Tensor output_sum(const std::string& module, const at::Tensor& partial) const;
  /// The gradient of that summand from the output's.
  [[nodiscard]] at::Tensor summand_gradient(const std::string& module,
                                            const at::Tensor& gradient) const;
  /// All tokens, where ranks have parts of the sequence.
  [[nodiscard]] at::Tensor whole_sequence(const std::string& module, const at::Tensor& own) const;

 private:
  struct Place {
    std::size_t group = 0, position = 0;
  };
  [[nodiscard]] int coordinate(Axis axis) const { return world_->coordinate(rank_, axis); }
  [[nodiscard]] at::Tensor recorded_partial(std::string_view module, at::Tensor partial_sum,
                                            Sink* sink) const;
  [[nodiscard]] at::Tensor column_input(std::string_view module, const at::Tensor& x) const;
  [[nodiscard]] at::Tensor column_linear(std::string_view module, const at::Tensor& x,
                                         const at::Tensor& weight,
                                         const std::optional<at::Tensor>& bias) const;
  [[nodiscard]] at::Tensor row_linear(std::string_view module, const at::Tensor& x,
                                      const at::Tensor& weight,
                                      const std::optional<at::Tensor>& bias, Sink* sink) const;
  /// Over tp; with a cut sequence this rank's part of the sum.
  [[nodiscard]] at::Tensor sum_over_tp(std::string_view what, const at::Tensor& part,
                                       const ReductionPoint& point) const;
  [[nodiscard]] const SplitVocabulary& vocabulary() const;
  [[nodiscard]] const Range& own_entries() const;
  /// The first `count` entries of dim `dim`, which stand at `begin` of a whole dim of `size`.
  [[nodiscard]] Layout box_layout(const at::Tensor& local, int dim, std::int64_t size,
                                  const Range& own) const;

  const NumericsSpec* numerics_;
  EmulatedWorld* world_;
  int rank_;
  bool record_partials_;
  EmulatedContext context_;
  std::map<std::string, Place, std::less<>> places_;  // of column modules
  std::set<std::string, std::less<>> copied_points_;
  // The input that a group's first module saw, and one view of it per module.
  struct Fan {
    at::Tensor input;
    std::vector<at::Tensor> views;
    std::vector<at::Tensor> outputs;  // of a fused product, by module
  };
  mutable std::map<std::size_t, Fan> fans_;
};

}  // namespace isoshard
