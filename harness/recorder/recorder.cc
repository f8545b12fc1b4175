// SPDX-License-Identifier: Apache-2.0
/// From tensors that pass to bytes that are recorded.
#include "harness/recorder/recorder.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

namespace isoshard {

Recorder::Recorder(RecordOptions options) : writer_(std::move(options)) {}
Recorder::~Recorder() = default;

void Recorder::record(const Site& site, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  writer_.write(site, host_tensor_of(value));
}

void Recorder::begin_step(int step) {
  writer_.begin_step(step);
}

at::Tensor Recorder::on_activation(const Site& site, at::Tensor value) {
  record(site, value);
  return value;
}

at::Tensor Recorder::on_activation_grad(const Site& site, at::Tensor gradient) {
  record(site, gradient);
  return gradient;
}

void Recorder::on_record(const Site& site, const at::Tensor& value) {
  record(site, value);
}

RankTrace Recorder::finish() {
  return writer_.finish();
}

}  // namespace isoshard
