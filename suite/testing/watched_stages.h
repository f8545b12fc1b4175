// SPDX-License-Identifier: Apache-2.0
/// A pipeline whose actions are watched.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "subjects/parallel/nd/schedule/pipeline_schedule.h"
#include "subjects/parallel/stage_runner.h"

namespace isoshard {

/// Makes each action through `around`, which gets the action (with the number of its stage in the
/// whole pipeline) and must call `act` once.
class WatchedStages final : public StageRunner {
 public:
  using Act = std::function<at::Tensor()>;
  using Around = std::function<at::Tensor(const PipelineAction& action, const Act& act)>;

  WatchedStages(std::unique_ptr<StageRunner> inner, std::vector<int> own_stages, Around around)
      : inner_(std::move(inner)), numbers_(std::move(own_stages)), around_(std::move(around)) {}
  [[nodiscard]] const std::vector<ModelSection>& sections() const noexcept override {
    return inner_->sections();
  }
  void run(std::size_t num_micro_batches, const StageWork& work) override {
    inner_->run(num_micro_batches, watched(work));
  }
  void run_forward(std::size_t num_micro_batches, const StageWork& work) override {
    inner_->run_forward(num_micro_batches, watched(work));
  }
  [[nodiscard]] bool has_parameter(std::size_t stage, std::string_view name) const override {
    return inner_->has_parameter(stage, name);
  }
  void add_shared(std::map<std::string, at::Tensor, std::less<>>& gradients) override {
    inner_->add_shared(gradients);
  }
  [[nodiscard]] std::vector<int> readers_of(std::string_view parameter) const override {
    return inner_->readers_of(parameter);
  }
  [[nodiscard]] bool has_loss() const noexcept override { return inner_->has_loss(); }
  [[nodiscard]] Communicator& group() const noexcept override { return inner_->group(); }

 private:
  [[nodiscard]] StageWork watched(const StageWork& work) const {
    const auto action = [this](ActionKind kind, std::size_t stage, std::size_t m) {
      return PipelineAction{kind, numbers_.at(stage), static_cast<int>(m)};
    };
    StageWork result;
    result.device = work.device;
    result.forward = [=, this](std::size_t stage, std::size_t m, const at::Tensor& input) {
      return around_(action(ActionKind::kForward, stage, m),
                     [&] { return work.forward(stage, m, input); });
    };
    result.backward = [=, this](std::size_t stage, std::size_t m, const at::Tensor& gradient) {
      return around_(action(ActionKind::kBackward, stage, m),
                     [&] { return work.backward(stage, m, gradient); });
    };
    result.backward_input = [=, this](std::size_t stage, std::size_t m,
                                      const at::Tensor& gradient) {
      return around_(action(ActionKind::kBackwardInput, stage, m),
                     [&] { return work.backward_input(stage, m, gradient); });
    };
    result.backward_weight = [=, this](std::size_t stage, std::size_t m) {
      (void)around_(action(ActionKind::kBackwardWeight, stage, m), [&] {
        work.backward_weight(stage, m);
        return at::Tensor();
      });
    };
    return result;
  }

  std::unique_ptr<StageRunner> inner_;
  std::vector<int> numbers_;
  Around around_;
};

}  // namespace isoshard
