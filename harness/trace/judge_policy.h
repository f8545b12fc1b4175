// SPDX-License-Identifier: Apache-2.0
/// How a run is judged: made once from what the run is, and read by recorder, judge and bundle.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/dtype.h"
#include "harness/trace/collective_calls.h"

namespace isoshard {

enum class Level : std::uint8_t { kExact, kBounded, kPerturbed, kReported };
[[nodiscard]] std::string_view name_of(Level level) noexcept;

/// Reference, perturbed runs and the run that is judged have the same policy.
struct JudgePolicy {
  /// For what is not exact anyway (data ids, masks, weights as read, replicas)
  Level level = Level::kPerturbed;
  double k = 3;                      ///< tolerance = k x the largest response
  Dtype coarsest = Dtype::kFloat32;  ///< the coarsest dtype on any tensor's path: floors use it
  /// For optimizers whose step is a sign where the gradient is noise (Adam): parameters after a
  /// step are compared only where the gradient is above its response.
  bool mask = false;
  /// Without responses: the largest relative Frobenius error and scale error of what is not exact
  /// anyway.
  std::optional<double> rtol;
  /// The factor that settings demand on activation gradients (dp for averaging); a record that
  /// declares another diverges.
  std::optional<double> activation_grad_scale;
  /// For the diagnosis. The norm that gradients are clipped to, 0 if unknown or none; how many
  /// names a parameter has, where that is more than one (tied weights).
  double max_grad_norm = 0;
  std::map<std::string, int, std::less<>> num_names = {};
  /// What each rank must call; empty: nobody says, and collectives are not judged.
  CollectiveTable collectives = {};
};

/// What a run that is compared with a reference is made for.
enum class RunPurpose : std::uint8_t {
  kJudged,
  kResponse,  ///< it shows how far the reference moves
};

/// Whether the run leaves out steps of small gradients. What is small the responses say, and of a
/// response run its own difference; where neither is there, everything must be equal.
[[nodiscard]] bool masks_small_gradients(const JudgePolicy& policy, int response_runs,
                                         RunPurpose purpose) noexcept;

}  // namespace isoshard
