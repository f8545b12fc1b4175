// SPDX-License-Identifier: Apache-2.0
// Frozen weights beside trained ones.
#include "subjects/parallel/frozen_weights.h"

#include "core/base/error.h"

namespace isoshard {

std::vector<ParameterSpec> trained_of(std::vector<ParameterSpec> specs,
                                      const TrainSettings& settings) {
  if (settings.freeze.empty()) return specs;
  const IsFrozen is_frozen = frozen_by(settings.freeze);
  std::erase_if(specs, [&](const ParameterSpec& spec) { return is_frozen(spec.name); });
  return specs;
}

std::vector<ParameterSpec> trained_parameters(const Model& model, const TrainSettings& settings) {
  return trained_of(model.parameters(), settings);
}

void FrozenBeside::setup(DataParallelSetup setup) {
  std::vector<HeldParameter> trained;
  for (HeldParameter& parameter : setup.parameters) {
    if (parameter.tensor.requires_grad()) {
      trained.push_back(std::move(parameter));
      continue;
    }
    layouts_[parameter.name] = std::move(parameter.layout);
    frozen_[parameter.name] = std::move(parameter.tensor);
  }
  if (trained.empty())
    throw UsageError("at least one parameter of a rank must be trained, got all of them frozen");
  setup.parameters = std::move(trained);
  inner().setup(std::move(setup));
}

const NamedTensors& FrozenBeside::before_forward() {
  read_ = inner().before_forward();
  read_.insert(frozen_.begin(), frozen_.end());
  return read_;
}

const NamedTensors& FrozenBeside::held() const {
  held_ = WrappedDataParallel::held();
  held_.insert(frozen_.begin(), frozen_.end());
  return held_;
}

Layout FrozenBeside::held_layout(std::string_view name) const {
  const auto frozen = layouts_.find(name);
  return frozen == layouts_.end() ? WrappedDataParallel::held_layout(name) : frozen->second;
}

at::Tensor FrozenBeside::held_in(std::string_view name, const at::Tensor& read) const {
  return layouts_.contains(name) ? read : WrappedDataParallel::held_in(name, read);
}

Layout FrozenBeside::read_layout(std::string_view name) const {
  const auto frozen = layouts_.find(name);
  return frozen == layouts_.end() ? WrappedDataParallel::read_layout(name) : frozen->second;
}

}  // namespace isoshard
