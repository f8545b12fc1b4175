// SPDX-License-Identifier: Apache-2.0
// One function a rule.
#include "suite/converge/converge_rules.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "core/base/sha256.h"
#include "core/base/suggest.h"
#include "fixtures/inputs/inputs.h"

namespace isoshard {
namespace {

constexpr std::size_t kShownDigits = 12;

using Sets = std::span<const TestSet>;

std::int64_t local_batch(const Case& item) {
  return item.batch_size * item.micro_batches;
}

std::int64_t tokens_per_step(const Case& item) {
  return item.degrees.dp * local_batch(item) * item.seq_length;
}

/// One sentence if all sets keep a rule, else one for each that does not.
template <class Broken>
ConvergeRule rule_of_sets(std::string name, std::string passed, Sets sets, const Broken& broken) {
  ConvergeRule rule{std::move(name), RuleStatus::kPass, ""};
  for (const TestSet& set : sets) {
    const std::string problem = broken(set);
    if (problem.empty()) continue;
    rule.status = RuleStatus::kRefused;
    rule.sentence +=
        (rule.sentence.empty() ? "" : "; ") + fmt::format("{}: {}", set.title, problem);
  }
  if (rule.status == RuleStatus::kPass) rule.sentence = std::move(passed);
  return rule;
}

ConvergeRule same_local_batch(const Case& control, Sets sets) {
  const std::int64_t wanted = local_batch(control);
  return rule_of_sets("local-batch", fmt::format("every run has the local batch {}", wanted), sets,
                      [&](const TestSet& set) {
                        const std::int64_t got = local_batch(set.item);
                        return got == wanted
                                   ? ""
                                   : fmt::format("the local batch must be the control's {}, got {}",
                                                 wanted, got);
                      });
}

ConvergeRule same_dp(const Case& control, Sets sets) {
  const int wanted = control.degrees.dp;
  return rule_of_sets(
      "dp-degree", fmt::format("every run has the data-parallel degree {}", wanted), sets,
      [&](const TestSet& set) {
        const int got = set.item.degrees.dp;
        return got == wanted ? "" : fmt::format("dp must be the control's {}, got {}", wanted, got);
      });
}

ConvergeRule same_tokens(const Case& control, Sets sets) {
  const std::int64_t wanted = tokens_per_step(control);
  return rule_of_sets(
      "tokens-per-step",
      fmt::format("every step of every run trains {} tokens (dp {} x local batch {} x {} tokens)",
                  wanted, control.degrees.dp, local_batch(control), control.seq_length),
      sets, [&](const TestSet& set) {
        const std::int64_t got = tokens_per_step(set.item);
        return got == wanted
                   ? ""
                   : fmt::format("tokens per step must be the control's {}, got {}", wanted, got);
      });
}

ConvergeRule same_data(const Case& control, Sets sets) {
  const std::string wanted = step_data_sha256(control);
  return rule_of_sets("data-ids",
                      fmt::format("every run reads the same token ids in each of its {} steps "
                                  "(SHA-256 {})",
                                  control.steps, wanted.substr(0, kShownDigits)),
                      sets, [&](const TestSet& set) {
                        const std::string got = step_data_sha256(set.item);
                        return got == wanted
                                   ? ""
                                   : fmt::format("the ids must be the control's {}, got {}",
                                                 wanted.substr(0, kShownDigits),
                                                 got.substr(0, kShownDigits));
                      });
}

/// The training settings of a case by dotted name, without how a local batch is cut and what the
/// set names as its technique.
std::map<std::string, std::string> compared_settings(const Case& item, const TestSet& set) {
  std::set<std::string, std::less<>> left_out = {"/data/batch_size", "/data/micro_batches"};
  for (const Setting& setting : settings()) {
    if (std::ranges::count(set.settings, setting.name) == 0 || setting.bundle_key.empty()) continue;
    std::string path = "/" + std::string(setting.bundle_key);
    std::ranges::replace(path, '.', '/');
    left_out.insert(std::move(path));
  }
  std::map<std::string, std::string> compared;
  const nlohmann::json flat = bundle_training(item).flatten();
  for (const auto& [key, value] : flat.items()) {
    if (!left_out.contains(key)) compared[key] = value.dump();
  }
  return compared;
}

ConvergeRule same_settings(const Case& control, Sets sets) {
  return rule_of_sets(
      "settings",
      "every other setting that decides what is computed is the control's (model, dtype, loss, "
      "optimizer, clipping, schedule, seed)",
      sets, [&](const TestSet& set) -> std::string {
        const auto wanted = compared_settings(control, set), got = compared_settings(set.item, set);
        for (const auto& [key, value] : wanted) {
          const auto found = got.find(key);
          if (found == got.end() || found->second != value)
            return fmt::format("{} must be the control's {}, got {}", key, value,
                               found == got.end() ? "nothing" : found->second);
        }
        return wanted.size() == got.size() ? "" : "it has settings that the control lacks";
      });
}

ConvergeRule filled_pipelines(Sets sets) {
  std::vector<std::string> found;
  for (const TestSet& set : sets) {
    if (set.item.degrees.pp == 1) continue;
    found.push_back(fmt::format("{}: local batch {} >= {} micro-batches >= {} stages", set.title,
                                local_batch(set.item), set.item.micro_batches,
                                set.item.degrees.pp * set.item.settings.nd.stages_per_rank));
  }
  return rule_of_sets(
      "pipeline-batch",
      found.empty() ? "no run has a pipeline" : fmt::format("{}", fmt::join(found, "; ")), sets,
      [](const TestSet& set) {
        const int stages = set.item.degrees.pp * set.item.settings.nd.stages_per_rank;
        const int got = set.item.micro_batches;
        return set.item.degrees.pp == 1 || (got >= stages && local_batch(set.item) >= got)
                   ? ""
                   : fmt::format(
                         "micro-batches must be from the {} stages to the "
                         "local batch {}, got {}",
                         stages, local_batch(set.item), got);
      });
}

ConvergeRule parallel_degrees(Sets sets) {
  return rule_of_sets(
      "degree", "every test set has a parallelism of degree p >= 2 or a technique", sets,
      [](const TestSet& set) {
        return set.dimensions > 1 || !set.techniques.empty()
                   ? ""
                   : "a parallelism must have a degree of at least 2, or the set is "
                     "the control";
      });
}

/// What a technique acts on. Where the axis has one rank, it does nothing, and nothing is tested.
struct ActsOn {
  std::string_view setting;
  Axis axis;
};
constexpr std::array kActsOn = {ActsOn{"make_vocab_size_divisible_by", Axis::kTp},
                                ActsOn{"sequence_parallel", Axis::kTp},
                                ActsOn{"context_order", Axis::kCp},
                                ActsOn{"context_attention", Axis::kCp},
                                ActsOn{"ring_merge_dtype", Axis::kCp},
                                ActsOn{"pipeline_schedule", Axis::kPp},
                                ActsOn{"stages_per_rank", Axis::kPp},
                                ActsOn{"stage_placement", Axis::kPp},
                                ActsOn{"layers_per_stage", Axis::kPp},
                                ActsOn{"dp_replicate", Axis::kDp}};

ConvergeRule techniques_that_act(Sets sets) {
  return rule_of_sets(
      "technique-acts", "every technique has the parallelism that it acts on", sets,
      [](const TestSet& set) -> std::string {
        for (const ActsOn& technique : kActsOn) {
          if (std::ranges::count(set.settings, technique.setting) == 0 ||
              set.item.degrees[technique.axis] > 1)
            continue;
          return fmt::format("{} must be at least 2, or {} does nothing, got 1",
                             name_of(technique.axis), technique.setting);
        }
        const int every = set.item.settings.recompute_every;
        if (every > set.item.config.num_layers)
          return fmt::format(
              "recompute-every must be at most the {} layers, or it does nothing, "
              "got {}",
              set.item.config.num_layers, every);
        const NdSettings& nd = set.item.settings.nd;
        if (std::ranges::count(set.settings, "dp_replicate") != 0 && nd.dp_replicate == 1)
          return "dp-replicate must be at least 2, or it does nothing, got 1";
        if (std::ranges::count(set.settings, "stages_per_rank") != 0 && nd.stages_per_rank < 2)
          return fmt::format("stages-per-rank must be at least 2, or it does nothing, got {}",
                             nd.stages_per_rank);
        return nd.ring_merge_dtype.has_value() && nd.context_attention != ContextAttention::kRing
                   ? "context-attention must be ring, or ring_merge_dtype does nothing"
                   : "";
      });
}

ConvergeRule techniques_of(Sets sets) {
  std::vector<std::string> found;
  for (const TestSet& set : sets) {
    for (const std::string& technique : set.techniques) {
      if (std::ranges::count(found, technique) == 0) found.push_back(technique);
    }
  }
  if (found.empty())
    return {"technique-control", RuleStatus::kPass, "no technique besides parallelism is tested"};
  return {"technique-control", RuleStatus::kPass,
          fmt::format("the control has none of {}: it is 1D FSDP without the technique",
                      fmt::join(found, ", "))};
}

ConvergeRule seeds_of(const RuleInputs& inputs) {
  if (!inputs.test_seeds.empty())
    return {"seeds", RuleStatus::kReported,
            fmt::format("controls have the seeds {}, test sets {}: runs are compared over seeds, "
                        "and no step by step",
                        fmt::join(inputs.seeds, ","), fmt::join(inputs.test_seeds, ","))};
  return {"seeds", RuleStatus::kReported,
          fmt::format("{} {}, each with a control of its own",
                      inputs.seeds.size() == 1 ? "one random seed:" : "random seeds",
                      fmt::join(inputs.seeds, ","))};
}

ConvergeRule weights_of(const RuleInputs& inputs) {
  const std::string& path = inputs.control.weights_path;
  if (!inputs.test_seeds.empty())
    return {"initial-weights", RuleStatus::kReported,
            "initial weights are drawn from different seeds and not shared"};
  if (!path.empty())
    return {"initial-weights", RuleStatus::kReported,
            fmt::format("all runs start from the seed checkpoint {}", path)};
  return {"initial-weights", RuleStatus::kReported,
          "a test set and its control start from the same weights: a value is a function of seed, "
          "name and index, however it is sharded, so no seed checkpoint is needed"};
}

ConvergeRule rate_of(const RuleInputs& inputs) {
  const std::int64_t global = inputs.control.degrees.dp * local_batch(inputs.control);
  const double rate = inputs.control.settings.optimizer.learning_rate;
  if (inputs.scaling == RateScaling::kNone)
    return {"learning-rate", RuleStatus::kReported,
            fmt::format("the rate is {:g} as given; it does not follow the global batch of {} "
                        "samples (--scale-lr)",
                        rate, global)};
  return {"learning-rate", RuleStatus::kReported,
          fmt::format("the rate is {:g}: {:g} of a global batch of {}, scaled ({}) to {} samples",
                      rate, inputs.base_rate, inputs.base_global_batch,
                      inputs.scaling == RateScaling::kLinear ? "linear" : "sqrt", global)};
}

ConvergeRule transitivity(Sets sets) {
  std::vector<std::string> lines;
  for (const TestSet& set : sets) {
    const std::vector<std::string> implied = implied_sets(set);
    if (!implied.empty())
      lines.push_back(fmt::format("{} covers {}", set.title, fmt::join(implied, " | ")));
  }
  return {"transitivity", RuleStatus::kReported,
          lines.empty() ? "no set has two parallelisms, so none covers another"
                        : fmt::format("where it converges, {}", fmt::join(lines, "; "))};
}

}  // namespace

std::string_view name_of(RuleStatus status) noexcept {
  switch (status) {
    case RuleStatus::kPass:
      return "pass";
    case RuleStatus::kRefused:
      return "refused";
    case RuleStatus::kReported:
      break;
  }
  return "reported";
}

RateScaling parse_rate_scaling(std::string_view name) {
  if (name == "none") return RateScaling::kNone;
  if (name == "linear") return RateScaling::kLinear;
  if (name == "sqrt") return RateScaling::kSquareRoot;
  const std::vector<std::string> known = {"none", "linear", "sqrt"};
  throw UsageError(fmt::format("--scale-lr must be one of {}, got '{}'{}", join_names(known), name,
                               did_you_mean(name, known)));
}

double scaled_rate(double rate, RateScaling scaling, std::int64_t global_batch,
                   std::int64_t base_global_batch) {
  const double ratio = static_cast<double>(global_batch) / static_cast<double>(base_global_batch);
  switch (scaling) {
    case RateScaling::kLinear:
      return rate * ratio;
    case RateScaling::kSquareRoot:
      return rate * std::sqrt(ratio);
    case RateScaling::kNone:
      break;
  }
  return rate;
}

std::vector<ConvergeRule> check_rules(const RuleInputs& inputs, Sets sets) {
  const Case& control = inputs.control;
  return {{"control", RuleStatus::kPass,
           fmt::format("the control set is 1D FSDP on dp {} ranks", control.degrees.dp)},
          same_local_batch(control, sets),
          same_dp(control, sets),
          same_tokens(control, sets),
          same_data(control, sets),
          same_settings(control, sets),
          filled_pipelines(sets),
          parallel_degrees(sets),
          techniques_that_act(sets),
          techniques_of(sets),
          seeds_of(inputs),
          weights_of(inputs),
          rate_of(inputs),
          transitivity(sets)};
}

void require_rules(std::span<const ConvergeRule> rules) {
  std::vector<std::string> refused;
  for (const ConvergeRule& rule : rules) {
    if (rule.status == RuleStatus::kRefused)
      refused.push_back(fmt::format("rule {}: {}", rule.name, rule.sentence));
  }
  if (!refused.empty()) throw UsageError(fmt::format("{}", fmt::join(refused, "\n  ")));
}

std::string step_data_sha256(const Case& item) {
  const CaseData data(item);
  Sha256 hash;
  const auto add = [&](const at::Tensor& tensor) {
    const at::Tensor whole = tensor.contiguous();
    hash.update({static_cast<const std::byte*>(whole.const_data_ptr()), whole.nbytes()});
  };
  for (int step = 0; step < item.steps; ++step) {
    const std::vector<TokenBatch> batches = data.global_batches(step);
    for (const TokenBatch& batch : batches) add(batch.input_ids_BS);
    for (const TokenBatch& batch : batches) add(batch.labels_BS);
  }
  return hash.hex_digest();
}

}  // namespace isoshard
