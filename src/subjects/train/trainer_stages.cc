// SPDX-License-Identifier: Apache-2.0
// What a rank of a pipeline computes: forward and backward of its sections.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "subjects/model/ops/loss.h"
#include "subjects/train/split_backward.h"
#include "subjects/train/trainer.h"

namespace isoshard {

class Trainer::StagePasses {
 public:
  StagePasses(Trainer& trainer, std::vector<MicroBatch>& micro_batches, int step, LossSums& sums)
      : trainer_(trainer),
        sections_(trainer.parts_.stages->sections()),
        micro_batches_(micro_batches),
        step_(step),
        sums_(sums) {
    for (std::size_t m = 0; m < micro_batches.size(); ++m) passes_.emplace_back(sections_.size());
  }

  StageWork work() {
    StageWork work;
    work.device = trainer_.parts_.device;
    work.forward = [this](std::size_t stage, std::size_t m, const at::Tensor& input) {
      return forward(stage, m, input);
    };
    work.backward = [this](std::size_t stage, std::size_t m, const at::Tensor& gradient) {
      return backward(stage, m, gradient);
    };
    work.backward_input = [this](std::size_t stage, std::size_t m, const at::Tensor& gradient) {
      return backward_input(stage, m, gradient);
    };
    work.backward_weight = [this](std::size_t stage, std::size_t m) { backward_weight(stage, m); };
    return work;
  }

 private:
  /// Of one micro-batch through one section, while backward needs it.
  struct Pass {
    at::Tensor input, result;
    at::Tensor gradient;  ///< of the result, of a section that has no input gradient
    SplitBackward halves;
  };

  at::Tensor forward(std::size_t stage, std::size_t m, const at::Tensor& input) {
    const MicroBatch& own = micro_batches_[m];
    Pass& pass = passes_[m][stage];
    const ModelSection& section = sections_[stage];
    TrainingPass training = trainer_.training_pass(step_, own);
    training.section = section;
    pass.input = section.has_embedding ? trainer_.own_tokens_on_device(own.batch->input_ids_BS)
                                       : input.detach().requires_grad_(true);
    trainer_.is_reading_ = trainer_.sink_ != nullptr && trainer_.parts_.records_repetitions &&
                           m == 0 && step_ > 0 && stage == 0;
    const at::Tensor result = trainer_.result_of(pass.input, trainer_.pass_sink(), training);
    trainer_.is_reading_ = false;
    if (!section.has_head) {
      pass.result = result;
      return result.detach();
    }
    pass.result = trainer_.loss_of(result, trainer_.own_tokens_on_device(own.targets_BS),
                                   sums_.places[m], sums_);
    return {};
  }

  at::Tensor backward(std::size_t stage, std::size_t m, const at::Tensor& gradient) {
    Pass pass = std::move(passes_[m][stage]);
    const bool is_last = begin_sum();
    pass.result.backward(seed(stage, pass.result, gradient));
    end_sum(stage, m, is_last);
    return sections_[stage].has_embedding ? at::Tensor() : pass.input.grad();
  }

  // Nobody waits for the first section's: its backward runs whole when weights are due.
  at::Tensor backward_input(std::size_t stage, std::size_t m, const at::Tensor& gradient) {
    Pass& pass = passes_[m][stage];
    if (sections_[stage].has_embedding) {
      pass.gradient = seed(stage, pass.result, gradient);
      return {};
    }
    const at::Tensor start = seed(stage, pass.result, gradient);
    return pass.halves.input_gradient(std::exchange(pass.result, {}), start,
                                      std::exchange(pass.input, {}));
  }

  void backward_weight(std::size_t stage, std::size_t m) {
    Pass pass = std::move(passes_[m][stage]);
    const bool is_last = begin_sum();
    if (sections_[stage].has_embedding) {
      pass.result.backward(pass.gradient);
    } else {
      pass.halves.weight_gradients();
    }
    end_sum(stage, m, is_last);
  }

  // What backward starts from, which is a step's loss once for each micro-batch.
  at::Tensor seed(std::size_t stage, const at::Tensor& result, const at::Tensor& gradient) {
    if (!sections_[stage].has_head) return gradient;
    at::Tensor seed = trainer_.seed_of(result);
    trainer_.backward_sum_ += result.item<double>() * seed.item<double>();
    return seed;
  }

  // Whether gradients of weights are added up for the last time in this step.
  bool begin_sum() {
    const bool is_last = ++num_sums_ == micro_batches_.size() * sections_.size();
    trainer_.parts_.data_parallel->before_backward(is_last);
    return is_last;
  }

  void end_sum(std::size_t stage, std::size_t m, bool is_last) {
    trainer_.parts_.data_parallel->after_backward(is_last, is_last);
    if (m + 1 < micro_batches_.size()) trainer_.record_accumulated(stage);
  }

  Trainer& trainer_;
  const std::vector<ModelSection>& sections_;
  std::vector<MicroBatch>& micro_batches_;
  int step_;
  LossSums& sums_;
  std::vector<std::vector<Pass>> passes_;  ///< by micro-batch and section
  std::size_t num_sums_ = 0;
};

void Trainer::run_stages(std::vector<MicroBatch>& micro_batches, MicroBatchPlace place,
                         LossSums& sums) {
  parts_.data_parallel->clear_gradients();
  for (const MicroBatch& micro_batch : micro_batches) record_data(*micro_batch.batch);
  StagePasses passes(*this, micro_batches, place.step, sums);
  parts_.stages->run(micro_batches.size(), passes.work());
  report_loss(sums);
}

void Trainer::evaluate_stages(std::span<const TokenBatch> micro_batches,
                              std::span<const at::Tensor> targets, LossSums& sums) {
  const std::vector<ModelSection>& sections = parts_.stages->sections();
  StageWork work;
  work.device = parts_.device;
  work.forward = [&](std::size_t stage, std::size_t m, const at::Tensor& input) {
    TrainingPass evaluation = evaluation_pass(micro_batches[m]);
    evaluation.section = sections[stage];
    const at::Tensor taken =
        sections[stage].has_embedding ? own_tokens_on_device(micro_batches[m].input_ids_BS) : input;
    const at::Tensor result = result_of(taken, nullptr, evaluation);
    if (!sections[stage].has_head) return result;
    (void)loss_of(result, own_tokens_on_device(targets[m]), sums.places[m], sums);
    return at::Tensor();
  };
  parts_.stages->run_forward(micro_batches.size(), work);
}

}  // namespace isoshard
