// SPDX-License-Identifier: Apache-2.0
/// A sink between a model whose loss is scaled and the sink that records it.
#pragma once
#include <utility>

#include "core/observe/sink.h"

namespace isoshard {

/// Declares the loss scale with the gradients of activations, which are recorded as they are.
class LossScaledSink final : public Sink {
 public:
  explicit LossScaledSink(Sink& inner) : inner_(&inner) {}
  void set_scale(double scale) noexcept { scale_ = scale; }
  void begin_step(int step) override { inner_->begin_step(step); }
  at::Tensor on_activation(const Site& site, at::Tensor value) override {
    return inner_->on_activation(site, std::move(value));
  }
  at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) override {
    Site scaled = site;
    scaled.grad_scale *= scale_;
    return inner_->on_activation_grad(scaled, std::move(gradient));
  }
  void on_record(const Site& site, const at::Tensor& value) override {
    inner_->on_record(site, value);
  }

 private:
  Sink* inner_;
  double scale_ = 1;
};

}  // namespace isoshard
