// SPDX-License-Identifier: Apache-2.0
// One sink in front of another.
#include "harness/run/sink_chain.h"

#include <ATen/core/Tensor.h>

#include <utility>

namespace isoshard {
namespace {

class ChainHead final : public Sink {
 public:
  ChainHead(TapMutation mutation, std::vector<TapObserver> observers, Sink& end)
      : mutation_(std::move(mutation)), observers_(std::move(observers)), end_(end) {}

  void begin_step(int step) override { end_.begin_step(step); }
  at::Tensor on_activation(const Site& site, at::Tensor value) override {
    return end_.on_activation(site, passed(site, std::move(value)));
  }
  at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) override {
    return end_.on_activation_grad(site, passed(site, std::move(gradient)));
  }
  void on_record(const Site& site, const at::Tensor& value) override {
    if (site.kind == RecordKind::kGrad) look(site, value);
    end_.on_record(site, value);
  }

 private:
  at::Tensor passed(const Site& site, at::Tensor value) const {
    if (mutation_) value = mutation_(site, std::move(value));
    look(site, value);
    return value;
  }
  void look(const Site& site, const at::Tensor& value) const {
    for (const TapObserver& observer : observers_) observer(site, value);
  }

  TapMutation mutation_;
  std::vector<TapObserver> observers_;
  Sink& end_;
};

}  // namespace

SinkChain::SinkChain(TapMutation mutation, std::vector<TapObserver> observers, Sink& end)
    : head_(&end) {
  if (!mutation && observers.empty()) return;
  own_ = std::make_unique<ChainHead>(std::move(mutation), std::move(observers), end);
  head_ = own_.get();
}

TapMutation counted(TapMutation mutation, const FaultProbe& probe) {
  if (!mutation) return {};  // this rank has no fault
  return [mutation = std::move(mutation), probe](const Site& site, at::Tensor value) {
    at::Tensor changed = mutation(site, value);
    if (!changed.is_same(value)) probe.fired();
    return changed;
  };
}

}  // namespace isoshard
