// SPDX-License-Identifier: Apache-2.0
/// A model: its parameters by Hugging Face name and its forward pass, written once for every
/// strategy.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/param_class.h"
#include "subjects/model/config/config.h"
#include "subjects/model/strategy.h"
#include "subjects/model/training_pass.h"

namespace isoshard {

/// kSigns: -1, 0 or 1, the half of them 0. kSparseRows: `row_nonzeros` entries of each row are -1
/// or 1, the others 0.
enum class ParamInit : std::uint8_t { kNormal, kZeros, kOnes, kSigns, kSparseRows };

/// What a step minimizes. kLinear: minus the sum of the targets' logits, whose gradient is -1 at
/// each target (linear_loss.h).
enum class LossKind : std::uint8_t { kCrossEntropy, kLinear };

/// How tensor parallelism may cut a parameter. kColumn: along its layer's output features. kRow:
/// along its layer's input features; the layer's outputs are then summed. kVocab: along the
/// vocabulary (embedding, head).
enum class TpRole : std::uint8_t { kReplicated, kColumn, kRow, kVocab };

/// Which dim is cut, and where. Weights are [out, in] but for Conv1D (GPT-2), which is [in, out]:
/// `dim` says it.
struct TpSplit {
  TpRole role = TpRole::kReplicated;
  int dim = -1;  ///< -1 if nothing is cut (kReplicated)
  /// A shard holds whole multiples of this many entries (a head, a kv group).
  std::int64_t unit = 1;
  /// Fused parts along `dim`, each cut on its own: a rank holds its part of q, of k and of v.
  /// Empty: one part, the whole dim.
  std::vector<std::int64_t> sections = {};
  /// The unit is a kv head, which may be copied to several ranks where tp is above the number of kv
  /// heads.
  bool is_kv = false;
  friend bool operator==(const TpSplit&, const TpSplit&) = default;
};

/// One parameter, unsharded.
struct ParameterSpec {
  std::string name;  ///< model.layers.0.self_attn.q_proj.weight
  Shape shape;
  ParamClass param_class = ParamClass::kMatrix;
  ParamInit init = ParamInit::kNormal;
  /// The bias of a row-parallel layer, norms and positions are kReplicated. A kQkNorm is too, but
  /// each rank's gradient holds its own heads only: sum them over tp.
  TpSplit tp = {};
  std::int64_t row_nonzeros = 1;  ///< kSparseRows
};

/// This rank's tensors by parameter name. A tied head has no entry of its own.
using Parameters = std::map<std::string, at::Tensor, std::less<>>;

/// Guarantees   stateless: forward may run for any Parameters, Strategy and Sink; every listed
///              point is tapped.
class Model {
 public:
  virtual ~Model() = default;
  [[nodiscard]] virtual const ModelConfig& config() const noexcept = 0;
  /// All parameters in model order, unsharded; a tied head is left out.
  [[nodiscard]] virtual std::vector<ParameterSpec> parameters() const = 0;
  /// The points that transformers returns as output_hidden_states: the embedding, each layer but
  /// the last, the final norm.
  [[nodiscard]] virtual std::vector<std::string> hidden_state_points() const;
  /// The module whose output is the logits, tied or not.
  [[nodiscard]] virtual std::string head_module() const { return "lm_head"; }
  [[nodiscard]] virtual LossKind loss_kind() const noexcept { return LossKind::kCrossEntropy; }
  /// The forward pass of an evaluation: nothing is dropped.
  /// Shapes   input_ids int64 [B,S]; returns logits [B,S,V] in the parameters' dtype.
  [[nodiscard]] at::Tensor forward(const at::Tensor& input_ids_BS, const Parameters& parameters,
                                   const Strategy& strategy, Sink* sink) const {
    return forward(input_ids_BS, parameters, strategy, sink, {});
  }
  /// The forward pass of a training step, or of a section of the model (TrainingPass::section),
  /// whose input and result then are those of the section. The model and all objects that the
  /// arguments refer to must outlive backward.
  [[nodiscard]] virtual at::Tensor forward(const at::Tensor& input_ids_BS,
                                           const Parameters& parameters, const Strategy& strategy,
                                           Sink* sink, const TrainingPass& training) const = 0;
};

/// Errors   UsageError for a model_type that no registered architecture has.
[[nodiscard]] std::unique_ptr<Model> make_model(const ModelConfig& config, AttentionImpl attention);
[[nodiscard]] std::vector<std::string> model_types();

}  // namespace isoshard
