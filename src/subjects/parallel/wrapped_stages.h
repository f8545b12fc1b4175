// SPDX-License-Identifier: Apache-2.0
/// Base of a pipeline that changes what another one is asked to run and forwards everything else
/// to it.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "subjects/parallel/stage_runner.h"

namespace isoshard {

/// Forwards all.   Ranks, Errors   those of `inner`.
class WrappedStages : public StageRunner {
 public:
  explicit WrappedStages(std::unique_ptr<StageRunner> inner) : inner_(std::move(inner)) {}
  [[nodiscard]] const std::vector<ModelSection>& sections() const noexcept override {
    return inner_->sections();
  }
  void run(std::size_t num_micro_batches, const StageWork& work) override {
    inner_->run(num_micro_batches, wrapped(work));
  }
  void run_forward(std::size_t num_micro_batches, const StageWork& work) override {
    inner_->run_forward(num_micro_batches, wrapped(work));
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

 protected:
  /// What `inner` runs instead: a copy of `work` with other functions.
  [[nodiscard]] virtual StageWork wrapped(const StageWork& work) = 0;

 private:
  std::unique_ptr<StageRunner> inner_;
};

}  // namespace isoshard
