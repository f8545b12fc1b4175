// SPDX-License-Identifier: Apache-2.0
/// A pipeline whose actions are watched.
#pragma once
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "subjects/parallel/nd/schedule/pipeline_schedule.h"
#include "subjects/parallel/wrapped_stages.h"

namespace isoshard {

/// Makes each action through `around`, which gets the action (with the number of its stage in the
/// whole pipeline) and must call `act` once.
class WatchedStages final : public WrappedStages {
 public:
  using Act = std::function<at::Tensor()>;
  using Around = std::function<at::Tensor(const PipelineAction& action, const Act& act)>;

  WatchedStages(std::unique_ptr<StageRunner> inner, std::vector<int> own_stages, Around around)
      : WrappedStages(std::move(inner)),
        numbers_(std::move(own_stages)),
        around_(std::move(around)) {}

 private:
  [[nodiscard]] StageWork wrapped(const StageWork& work) override {
    const auto action = [this](ActionKind kind, std::size_t stage, std::size_t m) {
      return PipelineAction{kind, numbers_.at(stage), static_cast<int>(m)};
    };
    StageWork result = work;
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

  std::vector<int> numbers_;
  Around around_;
};

}  // namespace isoshard
