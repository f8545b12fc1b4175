// SPDX-License-Identifier: Apache-2.0
// Wrappers of the seams that a step passes.
#include "suite/bench/timed_parts.h"

#include <memory>
#include <utility>

#include "subjects/parallel/wrapped_data_parallel.h"
#include "subjects/parallel/wrapped_stages.h"

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

class TimedStages final : public WrappedStages {
 public:
  TimedStages(std::unique_ptr<StageRunner> inner, StepClock& clock)
      : WrappedStages(std::move(inner)), clock_(clock) {}

 private:
  template <class... Args, class Result>
  std::function<Result(Args...)> timed(StepPart part, const std::function<Result(Args...)>& work) {
    if (!work) return {};
    return [this, part, work](Args... args) {
      const StepScope scope(clock_, part);
      return work(args...);
    };
  }
  [[nodiscard]] StageWork wrapped(const StageWork& work) override {
    StageWork result = work;
    result.forward = timed(StepPart::kForward, work.forward);
    result.backward = timed(StepPart::kBackward, work.backward);
    result.backward_input = timed(StepPart::kBackward, work.backward_input);
    result.backward_weight = timed(StepPart::kBackward, work.backward_weight);
    return result;
  }

  StepClock& clock_;
};

}  // namespace

void time_parts(TrainerParts& parts, StepClock& clock) {
  parts.data_parallel = std::make_unique<TimedDataParallel>(std::move(parts.data_parallel), clock);
  if (parts.stages != nullptr)
    parts.stages = std::make_unique<TimedStages>(std::move(parts.stages), clock);
}

}  // namespace isoshard
