// SPDX-License-Identifier: Apache-2.0
/// The seam between a training step and a pipeline: who runs which layers of which micro-batch
/// when.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/comm/communicator.h"
#include "subjects/model/training_pass.h"

namespace isoshard {

/// What a rank computes of a step, as the runner asks for it. `stage` counts this rank's sections.
struct StageWork {
  /// `input` is undefined where the section has the embedding. Returns the section's result without
  /// a graph; of one that has the head nothing.
  std::function<at::Tensor(std::size_t stage, std::size_t micro_batch, const at::Tensor& input)>
      forward = {};
  /// `gradient` is that of the section's result, undefined where it has the head. Returns the
  /// gradient of its input, undefined where it has the embedding.
  std::function<at::Tensor(std::size_t stage, std::size_t micro_batch, const at::Tensor& gradient)>
      backward = {};
  /// The two halves of backward, in this order: the gradient of the input alone, and those of
  /// weights.
  std::function<at::Tensor(std::size_t stage, std::size_t micro_batch, const at::Tensor& gradient)>
      backward_input = {};
  std::function<void(std::size_t stage, std::size_t micro_batch)> backward_weight = {};
  /// Where what comes from other stages is put; none: in host memory.
  std::optional<c10::Device> device = {};
};

/// Guarantees   run() asks for each forward of each section once, and for each backward once, whole
///              or in halves; for gradients of a section's weights in the order of micro-batches.
/// Ranks        run, run_forward and sum_over_stages are collective over the ranks of a pipeline.
class StageRunner {
 public:
  virtual ~StageRunner() = default;
  /// This rank's sections, in the order of the model.
  [[nodiscard]] virtual const std::vector<ModelSection>& sections() const noexcept = 0;
  virtual void run(std::size_t num_micro_batches, const StageWork& work) = 0;
  /// Asks for the forwards alone.
  virtual void run_forward(std::size_t num_micro_batches, const StageWork& work) = 0;
  /// Whether the section reads the parameter, and nobody else does.
  [[nodiscard]] virtual bool has_parameter(std::size_t stage, std::string_view name) const = 0;
  /// Of parameters that sections of two ranks read: the sum of both gradients, on both.
  /// Ranks   collective over these two.
  virtual void add_shared(std::map<std::string, at::Tensor, std::less<>>& gradients) = 0;
  /// The ranks of the pipeline that have a section that reads the parameter, ascending.
  [[nodiscard]] virtual std::vector<int> readers_of(std::string_view parameter) const = 0;
  /// Whether this rank has the section with the head, and so the loss.
  [[nodiscard]] virtual bool has_loss() const noexcept = 0;
  /// The ranks of a pipeline.
  [[nodiscard]] virtual Communicator& group() const noexcept = 0;
};

}  // namespace isoshard
