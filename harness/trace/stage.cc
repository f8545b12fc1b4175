// SPDX-License-Identifier: Apache-2.0
/// Stages and the words for records.
#include "harness/trace/stage.h"

#include <fmt/format.h>

#include "harness/trace/collective_calls.h"

namespace isoshard {
namespace {
constexpr std::string_view kOverflowFlag = "found_inf";
}

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

Stage stage_of(const RecordKey& key) noexcept {
  switch (key.kind) {
    case RecordKind::kDataId:
      return key.name == "next_sample_ids" ? Stage::kProgress : Stage::kDataIds;
    case RecordKind::kMask:
      return Stage::kMasks;
    case RecordKind::kParam:
      return (key.step == 0 && key.call == 0) || is_read_again(key) ? Stage::kParametersRead
                                                                    : Stage::kParameterAfterStep;
    case RecordKind::kActivation:
      return Stage::kForward;
    case RecordKind::kActivationGrad:
      return Stage::kActivationGrad;
    case RecordKind::kGrad:
      return unclipped_of(key).has_value() ? Stage::kClippedGrad : Stage::kParameterGrad;
    case RecordKind::kOptimizer:
      return Stage::kOptimizerState;
    case RecordKind::kScalar:
      break;
  }
  if (key.name == "learning_rate" || key.name == "loss_scale") return Stage::kStepSettings;
  if (key.name == "grad_norm" || key.name == kOverflowFlag) return Stage::kGradNorm;
  if (key.name == "optimizer_steps" || key.name == "rng_state") return Stage::kProgress;
  if (is_collectives(key)) return Stage::kCollectives;
  return key.name.starts_with("loss") ? Stage::kForward : Stage::kLogged;
}

RecordKey overflow_flag_of(int step) {
  return {step, RecordKind::kScalar, std::string(kOverflowFlag), 0};
}

bool is_overflow_flag(const RecordKey& key) noexcept {
  return key.kind == RecordKind::kScalar && key.name == kOverflowFlag;
}

std::string_view stepped_parameter(const RecordKey& key) noexcept {
  constexpr std::string_view kMaster = ".master";
  const std::string_view name = key.name;
  if (key.kind == RecordKind::kOptimizer && name.ends_with(kMaster))
    return name.substr(0, name.size() - kMaster.size());
  return stage_of(key) == Stage::kParameterAfterStep ? name : std::string_view();
}

bool is_exact(Stage stage) noexcept {
  return stage == Stage::kStepSettings || stage == Stage::kDataIds || stage == Stage::kMasks ||
         stage == Stage::kParametersRead || stage == Stage::kProgress ||
         stage == Stage::kCollectives;
}

namespace {
constexpr std::string_view kRecomputed = ".recomputed";
constexpr std::string_view kRead = ".read";
constexpr std::string_view kClipped = ".clipped";

std::optional<RecordKey> without(std::string_view suffix, const RecordKey& key) {
  if (!key.name.ends_with(suffix)) return std::nullopt;
  RecordKey other = key;
  other.name.resize(key.name.size() - suffix.size());
  return other;
}
}  // namespace

std::string recomputed_name(const std::string& name) {
  return name + std::string(kRecomputed);
}

std::optional<RecordKey> first_draw_of(const RecordKey& key) {
  if (key.kind != RecordKind::kMask && key.kind != RecordKind::kActivation) return std::nullopt;
  return without(kRecomputed, key);
}

std::string read_name(const std::string& parameter) {
  return parameter + std::string(kRead);
}

bool is_read_again(const RecordKey& key) noexcept {
  return key.kind == RecordKind::kParam && key.name.ends_with(kRead);
}

std::optional<std::string> parameter_read(const RecordKey& key) {
  if (key.kind != RecordKind::kParam) return std::nullopt;
  const std::optional<RecordKey> stepped = without(kRead, key);
  return stepped.has_value() ? std::optional(stepped->name) : std::nullopt;
}

bool is_own_repetition(const RecordKey& key) {
  return is_read_again(key) ||
         (key.kind == RecordKind::kActivation && first_draw_of(key).has_value());
}

std::string clipped_name(const std::string& parameter) {
  return parameter + std::string(kClipped);
}

std::optional<RecordKey> unclipped_of(const RecordKey& key) {
  return key.kind == RecordKind::kGrad ? without(kClipped, key) : std::nullopt;
}

std::string subject_of(const RecordKey& key) {
  switch (key.kind) {
    case RecordKind::kParam:
      return stage_of(key) == Stage::kParametersRead
                 ? fmt::format("weight as read {}", key.name)
                 : fmt::format("parameter after step {}", key.name);
    case RecordKind::kGrad:
      return fmt::format("gradient of {}", key.name);
    case RecordKind::kActivation:
      return fmt::format("forward at {}", key.name);
    case RecordKind::kActivationGrad:
      return fmt::format("gradient at {}", key.name);
    case RecordKind::kOptimizer:
      return fmt::format("optimizer state {}", key.name);
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
