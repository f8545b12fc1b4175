// SPDX-License-Identifier: Apache-2.0
/// Stages and the words for records.
#include "harness/trace/stage.h"

#include <fmt/format.h>

namespace isoshard {

std::string_view name_of(Stage stage) noexcept {
  switch (stage) {
    case Stage::kStepSettings:
      return "step settings";
    case Stage::kDataIds:
      return "data ids";
    case Stage::kMasks:
      return "masks";
    case Stage::kParametersRead:
      return "weights as read";
    case Stage::kForward:
      return "forward";
    case Stage::kActivationGrad:
      return "activation gradient";
    case Stage::kParameterGrad:
      return "parameter gradient";
    case Stage::kGradNorm:
      return "grad norm";
    case Stage::kClippedGrad:
      return "clipped gradient";
    case Stage::kOptimizerState:
      return "optimizer state";
    case Stage::kReplicaDrift:
      return "replica drift";
    case Stage::kParameterAfterStep:
      return "parameter after step";
    case Stage::kProgress:
      return "progress";
    case Stage::kLogged:
      return "logged number";
    case Stage::kCollectives:
      return "collectives";
  }
  return "unknown";
}

namespace {
Stage stage_of_scalar(NameRole role) noexcept {
  switch (role) {
    case NameRole::kLearningRate:
    case NameRole::kLossScale:
      return Stage::kStepSettings;
    case NameRole::kGradNorm:
    case NameRole::kFoundInf:
      return Stage::kGradNorm;
    case NameRole::kOptimizerSteps:
    case NameRole::kRngState:
      return Stage::kProgress;
    case NameRole::kCollectives:
      return Stage::kCollectives;
    default:
      return is_named_loss(role) ? Stage::kForward : Stage::kLogged;
  }
}
}  // namespace

Stage stage_of(const RecordKey& key) noexcept {
  const RecordName name = parsed(key);
  switch (key.kind) {
    case RecordKind::kDataId:
      return name == RecordName{"sample_ids", NameRole::kNext} ? Stage::kProgress : Stage::kDataIds;
    case RecordKind::kMask:
      return Stage::kMasks;
    case RecordKind::kParam:
      return (key.step == 0 && key.call == 0) || name.role == NameRole::kReadAgain
                 ? Stage::kParametersRead
                 : Stage::kParameterAfterStep;
    case RecordKind::kActivation:
      return Stage::kForward;
    case RecordKind::kActivationGrad:
      return Stage::kActivationGrad;
    case RecordKind::kGrad:
      return name.role == NameRole::kClipped ? Stage::kClippedGrad : Stage::kParameterGrad;
    case RecordKind::kOptimizer:
      return name.role == NameRole::kHyperparameters ? Stage::kStepSettings
                                                     : Stage::kOptimizerState;
    case RecordKind::kScalar:
      return stage_of_scalar(name.role);
  }
  return Stage::kLogged;
}

std::string_view stepped_parameter(const RecordKey& key) noexcept {
  const RecordName name = parsed(key);
  if (name.role == NameRole::kMaster) return name.base;
  return stage_of(key) == Stage::kParameterAfterStep ? std::string_view(key.name)
                                                     : std::string_view();
}

bool is_exact(Stage stage) noexcept {
  return stage == Stage::kStepSettings || stage == Stage::kDataIds || stage == Stage::kMasks ||
         stage == Stage::kParametersRead || stage == Stage::kProgress ||
         stage == Stage::kCollectives;
}

RecordKey base_of(const RecordKey& key) {
  const RecordName name = parsed(key);
  RecordKey base = key;
  switch (name.role) {
    case NameRole::kMicroBatch:
      base.call = 0;
      [[fallthrough]];
    case NameRole::kRecomputed:
    case NameRole::kReadAgain:
    case NameRole::kClipped:
    case NameRole::kSummand:
      base.name.resize(name.base.size());
      return base;
    default:
      return base;
  }
}

RecordKey final_of(const RecordKey& key) {
  return role_of(key) == NameRole::kMicroBatch ? base_of(key) : key;
}

RecordKey scalar_key(int step, NameRole role) {
  return {step, RecordKind::kScalar, scalar_name(role), 0};
}

bool is_own_repetition(const RecordKey& key) noexcept {
  const NameRole role = role_of(key);
  return role == NameRole::kReadAgain ||
         (key.kind == RecordKind::kActivation && role == NameRole::kRecomputed);
}

bool is_gradient_besides(const RecordKey& key) noexcept {
  const NameRole role = role_of(key);
  return role == NameRole::kClipped || role == NameRole::kMicroBatch;
}

std::string subject_of(const RecordKey& key) {
  switch (key.kind) {
    case RecordKind::kParam:
      return stage_of(key) == Stage::kParametersRead
                 ? fmt::format("weight as read {}", key.name)
                 : fmt::format("parameter after step {}", key.name);
    case RecordKind::kGrad:
      return role_of(key) == NameRole::kClipped
                 ? fmt::format("clipped gradient of {}", parsed(key).base)
                 : fmt::format("gradient of {}", key.name);
    case RecordKind::kActivation:
      return fmt::format("forward at {}", key.name);
    case RecordKind::kActivationGrad:
      return fmt::format("gradient at {}", key.name);
    case RecordKind::kOptimizer:
      return role_of(key) == NameRole::kHyperparameters
                 ? fmt::format("hyperparameters of {}", parsed(key).base)
                 : fmt::format("optimizer state {}", key.name);
    case RecordKind::kScalar:
      return key.name;
    case RecordKind::kDataId:
      return fmt::format("data ids {}", key.name);
    case RecordKind::kMask:
      return fmt::format("mask {}", key.name);
  }
  return key.name;
}

Stats stats_of(const Record& record) {
  Stats stats;
  for (const PartStats& part : record.parts) merge(stats, part.stats);
  return stats;
}

std::string describe(const RecordKey& key) {
  // A parameter's call number only tells before from after, which the words say already.
  if (key.call == 0 || key.kind == RecordKind::kParam)
    return fmt::format("{} (step {})", subject_of(key), key.step);
  return fmt::format("{} (step {}, call {})", subject_of(key), key.step, key.call);
}

}  // namespace isoshard
