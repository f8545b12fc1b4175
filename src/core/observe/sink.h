// SPDX-License-Identifier: Apache-2.0
/// The sink that receives what passes at named points of model and training code.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <utility>

#include "core/observe/site.h"

namespace isoshard {

/// Receives tensors. One per rank, given to subject and model from outside; never global, never
/// thread_local.
class Sink {
 public:
  virtual ~Sink() = default;
  /// Every later record belongs to this step. The first is step 0.
  virtual void begin_step(int step) = 0;
  /// Receives a forward value. Returns the tensor that the model continues with: the same one, or
  /// the one that a fault puts in its place.
  [[nodiscard]] virtual at::Tensor on_activation(const Site& site, at::Tensor value) = 0;
  /// The gradient at the same point. `site.kind` is kActivationGrad. Returns the gradient that
  /// backward continues with.
  [[nodiscard]] virtual at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) = 0;
  /// Receives a value that is only recorded (parameter, gradient, optimizer state, scalar, sample
  /// ids).
  virtual void on_record(const Site& site, const at::Tensor& value) = 0;
};

/// Sends x through the sink: records it and, if x requires grad, records its gradient in backward.
///
/// `layout` is a callable so that nothing is computed without a sink: [&] { return ctx.layout(x,
/// dim); } `grad_scale` is the factor on activation gradients (see Site); the activation itself is
/// recorded with 1. The gradient is the full gradient of the tensor that the sink returned, over
/// all its uses. The sink must outlive backward.
/// Ranks   local.
template <class LayoutFunction>
[[nodiscard]] at::Tensor tap(Sink* sink, std::string_view name, at::Tensor x, double grad_scale,
                             LayoutFunction&& layout);

namespace detail {
[[nodiscard]] at::Tensor tap_with_sink(Sink& sink, std::string_view name, at::Tensor x,
                                       double grad_scale, Layout layout, Layout grad_layout);
}

template <class LayoutFunction>
at::Tensor tap(Sink* sink, std::string_view name, at::Tensor x, double grad_scale,
               LayoutFunction&& layout) {
  if (sink == nullptr) return x;
  Layout value_layout = std::forward<LayoutFunction>(layout)();
  Layout grad_layout = value_layout;
  return detail::tap_with_sink(*sink, name, std::move(x), grad_scale, std::move(value_layout),
                               std::move(grad_layout));
}

}  // namespace isoshard
