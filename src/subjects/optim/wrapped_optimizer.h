// SPDX-License-Identifier: Apache-2.0
/// Base of an optimizer that changes the steps of another one and forwards everything else to it.
#pragma once
#include <memory>
#include <utility>

#include "subjects/optim/optimizer.h"

namespace isoshard {

/// Forwards all but step().   Ranks, Errors   those of `inner`.
class WrappedOptimizer : public Optimizer {
 public:
  explicit WrappedOptimizer(std::unique_ptr<Optimizer> inner) : inner_(std::move(inner)) {}
  void set_learning_rate(double rate) override { inner_->set_learning_rate(rate); }
  [[nodiscard]] NamedTensors state() const override { return inner_->state(); }
  [[nodiscard]] std::string_view rule() const override { return inner_->rule(); }
  [[nodiscard]] UpdateCounts updates() const override { return inner_->updates(); }
  void restore(const NamedTensors& state, const UpdateCounts& updates) override {
    inner_->restore(state, updates);
  }

 protected:
  [[nodiscard]] Optimizer& inner() noexcept { return *inner_; }

 private:
  std::unique_ptr<Optimizer> inner_;
};

}  // namespace isoshard
