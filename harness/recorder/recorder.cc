// SPDX-License-Identifier: Apache-2.0
/// From tensors that pass to bytes that are recorded.
#include "harness/recorder/recorder.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

namespace isoshard {

Recorder::Recorder(RecorderOptions options)
    : mutation_(std::move(options.mutation)), writer_(std::move(options)) {}
Recorder::~Recorder() = default;

at::Tensor Recorder::mutate(const Site& site, at::Tensor value) {
  if (!mutation_) return value;
  at::Tensor changed = mutation_(site, value);
  if (!changed.is_same(value)) ++mutations_;
  return changed;
}

void Recorder::record(const Site& site, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  writer_.write(site, host_tensor_of(value));
}

void Recorder::begin_step(int step) {
  writer_.begin_step(step);
}

at::Tensor Recorder::on_activation(const Site& site, at::Tensor value) {
  at::Tensor result = mutate(site, std::move(value));
  if (!site.recomputed) record(site, result);
  return result;
}

at::Tensor Recorder::on_activation_grad(const Site& site, at::Tensor gradient) {
  at::Tensor result = mutate(site, std::move(gradient));
  record(site, result);
  return result;
}

void Recorder::on_record(const Site& site, const at::Tensor& value) {
  record(site, value);
}

int Recorder::mutations() const noexcept {
  return mutations_;
}

RankTrace Recorder::finish() {
  return writer_.finish();
}

}  // namespace isoshard
