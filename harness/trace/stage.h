// SPDX-License-Identifier: Apache-2.0
/// The order in which a fault shows in a step.
#pragma once
#include <cstdint>
#include <string_view>

#include "harness/trace/record.h"

namespace isoshard {

/// The place of a record in the order in which faults show: what is set for the step, data ids,
/// masks, weights as read, forward, activation gradient, parameter gradient, grad norm, clipped
/// gradient, optimizer state, replica drift, parameter after step, progress, logged number,
/// collectives.
enum class Stage : std::uint8_t {
  kStepSettings,
  kDataIds,
  kMasks,
  kParametersRead,
  kForward,
  kActivationGrad,
  kParameterGrad,
  kGradNorm,
  kClippedGrad,
  kOptimizerState,
  kReplicaDrift,
  kParameterAfterStep,
  kProgress,
  kLogged,
  kCollectives
};
[[nodiscard]] std::string_view name_of(Stage stage) noexcept;

/// The stage of a record's value. A parameter's first record of a run (step 0, call 0) is the
/// weight as read, and so is one that is read again in a later step; every other one stands behind
/// a step. The clipped gradient is the one that is stepped with. The learning rate, the loss scale
/// and the hyperparameters of a parameter are set for the step, the number of updates, the state of
/// random numbers and the ids of the next samples say how far a run has come, the norm of gradients
/// is that before clipping, beside it stands whether they were not finite, losses belong to the
/// forward pass, every other scalar is a logged number. No record has stage kReplicaDrift: copies
/// do.
[[nodiscard]] Stage stage_of(const RecordKey& key) noexcept;

/// The parameter whose stepped values a record holds: the parameter after a step itself, or its
/// master among the optimizer's state. Empty for any other record.
[[nodiscard]] std::string_view stepped_parameter(const RecordKey& key) noexcept;

/// Whether every difference in value is a finding, whatever the tolerance: settings of the step,
/// data ids, masks, weights as read, progress and collectives.
[[nodiscard]] bool is_exact(Stage stage) noexcept;

/// "gradient of model.norm.weight", without step and call.
[[nodiscard]] std::string subject_of(const RecordKey& key);

}  // namespace isoshard
