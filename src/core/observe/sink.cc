// SPDX-License-Identifier: Apache-2.0
// Taps: the forward value to the sink now, its gradient when backward comes by.
#include "core/observe/sink.h"

#include <memory>

namespace isoshard {
namespace detail {

at::Tensor tap_with_sink(Sink& sink, std::string_view name, at::Tensor x, double grad_scale,
                         Layout layout, Layout grad_layout) {
  Site site{.kind = RecordKind::kActivation,
            .name = std::string(name),
            .layout = std::move(layout),
            .grad_scale = 1.0};
  at::Tensor passed = sink.on_activation(site, std::move(x));
  if (!passed.defined() || !passed.requires_grad()) return passed;
  site.kind = RecordKind::kActivationGrad;
  site.grad_scale = grad_scale;
  site.layout = std::move(grad_layout);
  // The hook owns the site and points to the sink, never to the tensor: a tensor that its own hook
  // holds would never die.
  auto grad_site = std::make_shared<const Site>(std::move(site));
  passed.register_hook([&sink, grad_site](at::Tensor gradient) -> at::Tensor {
    if (!gradient.defined()) return gradient;
    return sink.on_activation_grad(*grad_site, std::move(gradient));
  });
  return passed;
}

}  // namespace detail
}  // namespace isoshard
