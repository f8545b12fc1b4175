// SPDX-License-Identifier: Apache-2.0
// An autograd function that holds a layer's inputs and runs it twice.
#include "subjects/model/zoo/recompute.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <optional>
#include <utility>

#include "subjects/model/ops/autocast.h"

namespace isoshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Tells the recorder that activations come by for the second time. Their gradients come for the
// first.
class RepeatedSink final : public Sink {
 public:
  explicit RepeatedSink(Sink& inner) : inner_(&inner) {}
  void begin_step(int step) override { inner_->begin_step(step); }
  at::Tensor on_activation(const Site& site, at::Tensor value) override {
    Site again = site;
    again.recomputed = true;
    return inner_->on_activation(again, std::move(value));
  }
  at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) override {
    return inner_->on_activation_grad(site, std::move(gradient));
  }
  void on_record(const Site& site, const at::Tensor& value) override {
    inner_->on_record(site, value);
  }

 private:
  Sink* inner_;
};

struct LayerCall final : torch::CustomClassHolder {
  LayerCall(ForwardPass pass_in, ForwardPass::Layer layer_in, at::DeviceType device_in)
      : pass(std::move(pass_in)), layer(std::move(layer_in)), device(device_in) {
    if (at::autocast::is_autocast_enabled(device))
      autocast = at::autocast::get_autocast_dtype(device);
  }

  ForwardPass pass;
  ForwardPass::Layer layer;
  at::DeviceType device;
  std::optional<at::ScalarType> autocast;
};

class Recomputed final : public torch::autograd::Function<Recomputed> {
 public:
  static at::Tensor forward(AutogradContext* context, at::TensorList inputs,
                            const c10::intrusive_ptr<LayerCall>& call) {
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->save_for_backward(inputs.vec());
    // autograd functions run without a graph
    return call->layer(call->pass, std::span(inputs.data(), inputs.size()));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto call =
        c10::static_intrusive_pointer_cast<LayerCall>(context->saved_data["call"].toCapsule());
    std::unique_ptr<RepeatedSink> sink;  // hooks of the second graph point to it
    if (call->pass.sink() != nullptr) sink = std::make_unique<RepeatedSink>(*call->pass.sink());
    variable_list inputs;
    for (const at::Tensor& saved : context->get_saved_variables()) {
      inputs.push_back(saved.detach().requires_grad_(saved.requires_grad()));
    }
    torch::autograd::backward({second_output(*call, inputs, sink.get())}, {gradients[0]});
    variable_list result;
    for (const at::Tensor& input : inputs) result.push_back(input.grad());
    result.emplace_back();  // of the call
    return result;
  }

 private:
  static at::Tensor second_output(const LayerCall& call, const variable_list& inputs, Sink* sink) {
    const at::AutoGradMode with_graph(true);
    std::optional<AutocastScope> autocast;
    if (call.autocast.has_value()) autocast.emplace(call.device, *call.autocast);
    return call.layer(call.pass.repeated(sink), inputs);
  }
};

}  // namespace

at::Tensor recomputed(const ForwardPass& pass, std::vector<at::Tensor> inputs,
                      ForwardPass::Layer layer) {
  const at::DeviceType device = inputs.at(0).device().type();
  return Recomputed::apply(at::TensorList(inputs),
                           c10::make_intrusive<LayerCall>(pass, std::move(layer), device));
}

}  // namespace isoshard
