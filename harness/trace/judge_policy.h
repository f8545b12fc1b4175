// SPDX-License-Identifier: Apache-2.0
/// How a run is judged: made once from what the run is, and read by recorder, judge and bundle.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/axis.h"
#include "core/base/dtype.h"
#include "harness/trace/collective_calls.h"
#include "harness/trace/record.h"

namespace isoshard {

enum class Level : std::uint8_t { kExact, kBounded, kPerturbed, kReported };
[[nodiscard]] std::string_view name_of(Level level) noexcept;

/// The numbers of AdamW's rule, which say how far one step may move a weight.
struct StepRule {
  double learning_rate = 0;  ///< where the reference does not record one for the step
  double weight_decay = 0, beta1 = 0, beta2 = 0, eps = 0;
};

/// Reference, perturbed runs and the run that is judged have the same policy.
struct JudgePolicy {
  /// For what is not exact anyway (data ids, masks, weights as read, replicas)
  Level level = Level::kPerturbed;
  double k = 3;                      ///< tolerance = k x the largest response
  Dtype coarsest = Dtype::kFloat32;  ///< the coarsest dtype on any tensor's path: floors use it
  /// For optimizers whose step is a sign where the gradient is noise (Adam): parameters after a
  /// step are compared only where the gradient is above its response.
  bool mask = false;
  /// What bounds a step where nothing is compared. None: every finite step is allowed there.
  std::optional<StepRule> step_rule = {};
  /// Without responses: the largest relative Frobenius error and scale error of what is not exact
  /// anyway.
  std::optional<double> rtol = {};
  /// The factor that settings demand on activation gradients (dp for averaging); a record that
  /// declares another diverges.
  std::optional<double> activation_grad_scale = {};
  /// The same for parameters' gradients: a run that declares another factor diverges. None: what a
  /// run declares is taken, so a wrong factor that it declares is not seen. Nothing but gradients
  /// may have a scale in any case.
  std::optional<double> grad_scale = 1;
  /// Which records may be partial sums, as patterns (matches_any). None: activations and their
  /// gradients may. "KIND/NAME=max" allows the largest of the ranks' values. A rank's own summands,
  /// activations "X.partial", always may.
  std::optional<std::vector<std::string>> partial = {};
  /// Records that need not be there, as patterns: one that no rank has is listed instead of missed.
  std::vector<std::string> not_recorded = {};
  /// The same of single records, which a filter leaves out.
  std::set<RecordKey> left_out = {};
  /// Axes that need no witness (AxisWitness). Along any other one a run is vacuous in which all
  /// ranks do the whole work, or get equal samples.
  std::set<Axis> may_be_unused = {};
  /// For the diagnosis. The norm that gradients are clipped to, 0 if unknown or none; how many
  /// names a parameter has, where that is more than one (tied weights).
  double max_grad_norm = 0;
  std::map<std::string, int, std::less<>> num_names = {};
  /// Whether activation gradients may differ where all parameters' gradients clear them, as those
  /// of a framework whose own hooks run behind the recorder's (harness/judge/noted_taps.h).
  bool taps_may_differ = false;
  /// What each rank must call; empty: nobody says, and collectives are not judged.
  CollectiveTable collectives = {};
};

/// Whether one of the patterns stands for the record: "KIND/NAME" with * for any characters (none,
/// too) and ? for one, such as "activation_grad/*.k_proj" or "scalar/grad_norm". Steps and calls do
/// not matter.
[[nodiscard]] bool matches_any(const std::vector<std::string>& patterns, const RecordKey& key);

/// Whether one of the patterns of JudgePolicy::partial says that the record may be a maximum. A
/// maximum hides copies that are too small, so only "KIND/NAME=max" allows it.
[[nodiscard]] bool may_be_maximum(const std::vector<std::string>& patterns, const RecordKey& key);

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
