// SPDX-License-Identifier: Apache-2.0
/// A pipeline that carries out a schedule.
#pragma once
#include <cstddef>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
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
///              A group is issued and left alone: the rank computes on, and waits for what it
///              receives before the action that needs it.
/// Ranks        the shape and dtype of what goes between two stages is told once, before the first
///              micro-batch of a run in each direction.
class Pipeline final : public StageRunner {
 public:
  /// The number of micro-batches of `spec` does not count: that of run() does. `specs` are all of
  /// the model's parameters.
  /// Errors   UsageError unless there is a stage for each of the spec's; NotBuiltError where
  ///          several stages of one rank, or more than two, read one parameter.
  Pipeline(PipelineSpec spec, std::vector<ModelSection> stages,
           const std::vector<ParameterSpec>& specs, Communicator& pp);
  [[nodiscard]] const std::vector<ModelSection>& sections() const noexcept override { return own_; }
  void run(std::size_t num_micro_batches, const StageWork& work) override;
  void run_forward(std::size_t num_micro_batches, const StageWork& work) override;
  [[nodiscard]] bool has_parameter(std::size_t stage, std::string_view name) const override {
    return parameters_.at(stage).contains(name);
  }
  void add_shared(std::map<std::string, at::Tensor, std::less<>>& gradients) override;
  [[nodiscard]] std::vector<int> readers_of(std::string_view parameter) const override;
  [[nodiscard]] bool has_loss() const noexcept override { return own_.back().has_head; }
  [[nodiscard]] Communicator& group() const noexcept override { return *pp_; }

 private:
  /// By stage that gets it and micro-batch.
  using Passed = std::map<std::pair<int, int>, at::Tensor>;
  void find_shared(const std::vector<ModelSection>& stages,
                   const std::vector<ParameterSpec>& specs);
  [[nodiscard]] bool is_shared(std::string_view parameter) const;
  void prepare(int num_micro_batches);
  [[nodiscard]] std::vector<PipelineTurn> own_turns(const PipelineSchedule& schedule) const;
  /// What throws here aborts the world: no rank waits for what this one does not send any more.
  void take(const std::vector<PipelineTurn>& turns, const StageWork& work);
  void take_turns(const std::vector<PipelineTurn>& turns, const StageWork& work);
  void act(const PipelineAction& action, const StageWork& work);
  void exchange(const std::vector<StageTransfer>& transfers, std::optional<at::Device> device);
  void wait_for_groups(std::size_t count);
  void tell_shapes(const std::vector<StageTransfer>& transfers, std::optional<at::Device> device);
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
  /// A group of transfers on its way, with what it sends and receives.
  struct Group {
    std::vector<at::Tensor> tensors;  // die after the work, which reads and fills them
    Work work;
  };
  std::deque<Group> on_their_way_;
  std::size_t num_arrived_ = 0;  ///< groups of this run before those on their way
  /// By direction, receiving stage and micro-batch: the groups up to which all must have arrived.
  std::map<std::tuple<bool, int, int>, std::size_t> due_;
  /// Of what the stage gets or sends: by (direction, receiving stage).
  std::map<std::pair<bool, int>, at::Tensor> shapes_;
};

}  // namespace isoshard
