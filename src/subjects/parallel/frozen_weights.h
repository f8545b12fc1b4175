// SPDX-License-Identifier: Apache-2.0
/// Frozen weights: which they are, and where they are kept beside those that are trained.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "subjects/model/model.h"
#include "subjects/parallel/wrapped_data_parallel.h"
#include "subjects/settings/settings.h"

namespace isoshard {

/// Those of `specs` that the settings do not freeze, in their order.
/// Errors   as frozen_by.
[[nodiscard]] std::vector<ParameterSpec> trained_of(std::vector<ParameterSpec> specs,
                                                    const TrainSettings& settings);
/// The same of all parameters of a model.
[[nodiscard]] std::vector<ParameterSpec> trained_parameters(const Model& model,
                                                            const TrainSettings& settings);

/// Every rank holds its whole part of each frozen parameter; `inner` sees the others only. So DDP,
/// ZeRO 1 and 2 and Megatron's gradient buffers do.
///
/// Errors   of setup: UsageError if every parameter that this rank has is frozen.
class FrozenBeside final : public WrappedDataParallel {
 public:
  using WrappedDataParallel::WrappedDataParallel;
  [[nodiscard]] bool takes_frozen() const noexcept override { return true; }
  void setup(DataParallelSetup setup) override;
  [[nodiscard]] const NamedTensors& before_forward() override;
  [[nodiscard]] const NamedTensors& held() const override;
  [[nodiscard]] Layout held_layout(std::string_view name) const override;
  [[nodiscard]] at::Tensor held_in(std::string_view name, const at::Tensor& read) const override;
  [[nodiscard]] Layout read_layout(std::string_view name) const override;

 private:
  NamedTensors frozen_;
  std::map<std::string, Layout, std::less<>> layouts_;
  NamedTensors read_;
  mutable NamedTensors held_;  ///< all, of the last call of held()
};

}  // namespace isoshard
