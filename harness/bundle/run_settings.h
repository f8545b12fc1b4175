// SPDX-License-Identifier: Apache-2.0
/// What a bundle says of its run: settings that two comparable runs share, and those the judge
/// needs.
///
///     {"training": {"dtype": "bf16", "optimizer": {"kind": "adamw", "learning_rate": 0.001}, ...},
///      "judging": {"coarsest_dtype": "bf16", "mask_small_gradients": true,
///                  "activation_grad_scale": 2, "partial": ["activation_grad/*.k_proj"],
///                  "max_grad_norm": 1, "num_names": {"model.embed_tokens.weight": 2},
///                  "collectives": [...]}}
///
/// Of "judging" only the trusted run's word counts: it says how runs are judged against it.
/// Each part may be missing, and so may each key; a subject that is not ours names its training
/// settings as it likes.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "harness/bundle/run_calls.h"
#include "harness/trace/judge_policy.h"

namespace isoshard {

struct RunSettings {
  /// "optimizer.kind" -> "\"adamw\"": dotted names, values as JSON text, both in one vocabulary
  /// (harness/bundle/setting_names.h). Empty: the run does not say.
  std::map<std::string, std::string> training;
  std::optional<Dtype> coarsest_dtype;       ///< as JudgePolicy::coarsest
  std::optional<bool> mask_small_gradients;  ///< as JudgePolicy::mask
  /// As JudgePolicy: of runs that are judged against this one.
  std::optional<double> activation_grad_scale;
  /// "dp" stands for the scale: it is the number of dp ranks of the run that is judged.
  bool activation_grad_scale_is_dp = false;
  std::optional<double> grad_scale;                   ///< as JudgePolicy
  std::optional<std::vector<std::string>> partial;    ///< as JudgePolicy
  std::optional<double> max_grad_norm;                ///< as JudgePolicy
  std::map<std::string, int, std::less<>> num_names;  ///< as JudgePolicy
  /// What ranks of runs that are judged against this one must call.
  std::vector<RunCalls> collectives;
};

/// The part "judging" of the settings of a run.
[[nodiscard]] nlohmann::json judging_json(const JudgePolicy& policy);

/// Errors   FileError that starts with `origin`: no JSON object, an unknown key of "judging", a
///          value of a wrong type or range, one training setting under two names with two values.
[[nodiscard]] RunSettings parse_run_settings(std::string_view json,
                                             const std::filesystem::path& origin);

/// The numbers of AdamW's rule, as the training settings say them: "optimizer.learning_rate",
/// "optimizer.weight_decay", "optimizer.beta1", "optimizer.beta2" and "optimizer.eps". None unless
/// all of them are there, as numbers.
[[nodiscard]] std::optional<StepRule> step_rule_of(const RunSettings& settings);

/// One line for each training setting that is not the same.
struct SettingDifferences {
  std::vector<std::string> different;  ///< "optimizer.kind: reference \"sgd\", actual \"adamw\""
  /// What only one run says: "steps: reference 1, actual does not say". Environment variables are
  /// different instead, because one that is not set has a meaning.
  std::vector<std::string> unshared;
};

/// Whose word counts that its batches come from a file: then how samples were drawn, and where
/// samplers and random streams stand, is nothing that both runs have.
enum class BatchFileOf : std::uint8_t { kTrusted, kEither };

/// Empty when one of the runs says nothing at all. Where weights of one run came from a file, which
/// another run may have saved, how the other run made its own is no difference: weights are
/// recorded, and compared bit by bit. Ids are, too, but not where a sampler stands, so of batches
/// it is no difference only where a run whose word counts says that they came from a file.
[[nodiscard]] SettingDifferences setting_differences(
    const RunSettings& reference, const RunSettings& actual,
    BatchFileOf batch_file = BatchFileOf::kTrusted);

/// All lines of setting_differences: for runs of one program, which says all its settings.
[[nodiscard]] std::vector<std::string> differing_settings(
    const RunSettings& reference, const RunSettings& actual,
    BatchFileOf batch_file = BatchFileOf::kTrusted);

/// Whether a run whose word counts says that its batches came from a file.
[[nodiscard]] bool is_from_batch_file(const RunSettings& reference, const RunSettings& actual,
                                      BatchFileOf batch_file);

}  // namespace isoshard
