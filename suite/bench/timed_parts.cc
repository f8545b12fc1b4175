// SPDX-License-Identifier: Apache-2.0
// Wrappers of the seams that a step passes.
#include "suite/bench/timed_parts.h"

#include <memory>
#include <utility>

#include "subjects/parallel/wrapped_data_parallel.h"

namespace isoshard {
namespace {

class TimedDataParallel final : public WrappedDataParallel {
 public:
  TimedDataParallel(std::unique_ptr<DataParallel> inner, StepClock& clock)
      : WrappedDataParallel(std::move(inner)), clock_(clock) {}
  [[nodiscard]] const NamedTensors& before_forward() override {
    clock_.enter(StepPart::kForward);
    return inner().before_forward();
  }
  void before_backward(bool reduces) override {
    clock_.enter(StepPart::kBackward);
    inner().before_backward(reduces);
  }
  void after_backward(bool reduces, bool is_last) override {
    inner().after_backward(reduces, is_last);
    clock_.enter(StepPart::kOther);
  }

 private:
  StepClock& clock_;
};

class TimedStages final : public StageRunner {
 public:
  TimedStages(std::unique_ptr<StageRunner> inner, StepClock& clock)
      : inner_(std::move(inner)), clock_(clock) {}
  [[nodiscard]] const std::vector<ModelSection>& sections() const noexcept override {
    return inner_->sections();
  }
  void run(std::size_t num_micro_batches, const StageWork& work) override {
    inner_->run(num_micro_batches, timed(work));
  }
  void run_forward(std::size_t num_micro_batches, const StageWork& work) override {
    inner_->run_forward(num_micro_batches, timed(work));
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
  template <class... Args, class Result>
  std::function<Result(Args...)> timed(StepPart part, const std::function<Result(Args...)>& work) {
    if (!work) return {};
    return [this, part, work](Args... args) {
      const StepScope scope(clock_, part);
      return work(args...);
    };
  }
  [[nodiscard]] StageWork timed(const StageWork& work) {
    return {timed(StepPart::kForward, work.forward), timed(StepPart::kBackward, work.backward),
            timed(StepPart::kBackward, work.backward_input),
            timed(StepPart::kBackward, work.backward_weight)};
  }

  std::unique_ptr<StageRunner> inner_;
  StepClock& clock_;
};

}  // namespace

void time_parts(TrainerParts& parts, StepClock& clock) {
  parts.data_parallel = std::make_unique<TimedDataParallel>(std::move(parts.data_parallel), clock);
  if (parts.stages != nullptr)
    parts.stages = std::make_unique<TimedStages>(std::move(parts.stages), clock);
}

}  // namespace isoshard
