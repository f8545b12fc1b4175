// SPDX-License-Identifier: Apache-2.0
/// A pipeline that carries out a schedule.
#pragma once
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "subjects/parallel/nd/schedule/pipeline_schedule.h"
#include "subjects/parallel/nd/schedule/schedule_transfers.h"
#include "subjects/parallel/nd/stages.h"
#include "subjects/parallel/stage_runner.h"

namespace isoshard {

/// Requires     `stages` are those of the whole pipeline, in order; `pp` outlives it.
/// Guarantees   a schedule is checked (require_sound) before it runs. Activations travel as
///              pipe.forward, their gradients as pipe.backward, in the groups of pipeline_turns.
/// Ranks        the shape and dtype of what goes between two stages is told once, before the first
///              micro-batch of a run in each direction.
class Pipeline final : public StageRunner {
 public:
  /// The number of micro-batches of `spec` does not count: that of run() does. `specs` are all of
  /// the model's parameters.
  /// Errors   UsageError unless there is a stage for each of the spec's; NotBuiltError where
  ///          several stages read one parameter, unless the pipeline is of two ranks and each has
  ///          one of them.
  Pipeline(PipelineSpec spec, std::vector<ModelSection> stages,
           const std::vector<ParameterSpec>& specs, Communicator& pp);
  [[nodiscard]] const std::vector<ModelSection>& sections() const noexcept override { return own_; }
  void run(std::size_t num_micro_batches, const StageWork& work) override;
  [[nodiscard]] bool has_parameter(std::size_t stage, std::string_view name) const override {
    return parameters_.at(stage).contains(name);
  }
  void add_shared(std::map<std::string, at::Tensor, std::less<>>& gradients) override;
  [[nodiscard]] bool is_everywhere(std::string_view parameter) const override;
  [[nodiscard]] bool has_loss() const noexcept override { return own_.back().has_head; }
  [[nodiscard]] Communicator& group() const noexcept override { return *pp_; }

 private:
  /// By stage that gets it and micro-batch.
  using Passed = std::map<std::pair<int, int>, at::Tensor>;
  void find_shared(const std::vector<ModelSection>& stages,
                   const std::vector<ParameterSpec>& specs);
  void prepare(int num_micro_batches);
  void act(const PipelineAction& action, const StageWork& work);
  void exchange(const std::vector<StageTransfer>& transfers);
  void tell_shapes(const std::vector<StageTransfer>& transfers);
  [[nodiscard]] Passed& passed(bool is_gradient) noexcept {
    return is_gradient ? gradients_ : activations_;
  }
  [[nodiscard]] std::size_t index_of(int stage) const;

  PipelineSpec spec_;
  std::vector<ModelSection> own_;
  std::vector<std::set<std::string, std::less<>>> parameters_;  ///< by own section
  /// Parameters that a section of another rank reads, too, in model order.
  struct Shared {
    std::string name;
    ParamClass param_class = ParamClass::kTied;
    int peer = 0;          ///< pp rank
    bool is_first = true;  ///< of the two, in the order of sections
  };
  std::vector<Shared> shared_;
  std::vector<int> numbers_;  ///< of own stages in the whole pipeline
  Communicator* pp_;
  std::vector<PipelineTurn> turns_;  ///< of this rank, for spec_.micro_batches
  Passed activations_, gradients_;
  /// Of what the stage gets or sends: by (direction, receiving stage).
  std::map<std::pair<bool, int>, at::Tensor> shapes_;
};

}  // namespace isoshard
