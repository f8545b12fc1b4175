// SPDX-License-Identifier: Apache-2.0
/// Reading the settings of a bundle.
#include "harness/bundle/run_settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "harness/bundle/bundle_form.h"
#include "harness/bundle/setting_names.h"

namespace isoshard {
namespace {

using nlohmann::json;

[[noreturn]] void refuse_settings(const std::filesystem::path& origin, std::string_view what) {
  detail::refuse_form(origin, fmt::format("settings: {}", what));
}

/// Dotted names in the words of docs/reference/bundle.md, and values as JSON text.
class Flattened {
 public:
  explicit Flattened(const std::filesystem::path& origin) : origin_(origin) {}

  void add(const json& object, const std::string& prefix) {
    for (const auto& [key, value] : object.items()) {
      const std::string name = prefix.empty() ? key : prefix + "." + key;
      if (value.is_object()) {
        add(value, name);
      } else if (name == "optimizer.betas" && value.is_array() && value.size() == 2) {
        set(name, "optimizer.beta1", value.at(0));
        set(name, "optimizer.beta2", value.at(1));
      } else {
        set(name, canonical_setting(name), value);
      }
    }
  }

  [[nodiscard]] std::map<std::string, std::string> settings() && { return std::move(settings_); }

 private:
  void set(const std::string& said, const std::string& name, const json& value) {
    const std::string text = canonical_value(name, value);
    const auto [found, is_new] = settings_.emplace(name, text);
    if (!is_new && !are_same_setting(found->second, text))
      refuse_settings(origin_, fmt::format("{} must have one value, got {} and {} (as {})", name,
                                           found->second, text, said));
  }

  const std::filesystem::path& origin_;
  std::map<std::string, std::string> settings_;
};

Dtype dtype_of(const json& value, const std::filesystem::path& origin) {
  if (!value.is_string()) {
    refuse_settings(origin, fmt::format("coarsest_dtype must be a string, got {}", value.dump()));
  }
  try {
    const Dtype dtype = parse_dtype(value.get<std::string>());
    if (!is_floating(dtype))
      refuse_settings(origin, fmt::format("coarsest_dtype must be a floating-point type, got {}",
                                          value.dump()));
    return dtype;
  } catch (const UsageError& error) {
    refuse_settings(origin, error.what());
  }
}

double number_of(const json& value, std::string_view key, const std::filesystem::path& origin) {
  if (!value.is_number() || !std::isfinite(value.get<double>()))
    refuse_settings(origin, fmt::format("{} must be a finite number, got {}", key, value.dump()));
  return value.get<double>();
}

double scale_of(const json& value, std::string_view key, const std::filesystem::path& origin) {
  const double scale = number_of(value, key, origin);
  if (!(scale > 0))
    refuse_settings(
        origin, fmt::format("{} must be above 0, because gradients are divided by it, got {}", key,
                            value.dump()));
  return scale;
}

std::vector<std::string> patterns_of(const json& value, std::string_view key,
                                     const std::filesystem::path& origin) {
  std::vector<std::string> patterns;
  for (const json& pattern : value.is_array() ? value : json::array({nullptr})) {
    if (!pattern.is_string())
      refuse_settings(origin,
                      fmt::format("{} must be a list of patterns such as [\"scalar/loss\"], got {}",
                                  key, value.dump()));
    patterns.push_back(pattern.get<std::string>());
  }
  return patterns;
}

void read_num_names(const json& value, const std::filesystem::path& origin, RunSettings& settings) {
  if (!value.is_object()) {
    refuse_settings(origin, fmt::format("num_names must be an object, got {}", value.dump()));
  }
  for (const auto& [name, count] : value.items()) {
    if (!count.is_number_integer() || count.get<std::int64_t>() < 1 ||
        count.get<std::int64_t>() > 1000) {
      refuse_settings(origin, fmt::format("num_names of {} must be from 1 to 1000, got {}", name,
                                          count.dump()));
    }
    settings.num_names[name] = count.get<int>();
  }
}

void read_judging(const json& judging, const std::filesystem::path& origin, RunSettings& settings) {
  for (const auto& [key, value] : judging.items()) {
    if (key == "coarsest_dtype") {
      settings.coarsest_dtype = dtype_of(value, origin);
    } else if (key == "mask_small_gradients") {
      if (!value.is_boolean())
        refuse_settings(origin, fmt::format("mask_small_gradients must be true or false, got {}",
                                            value.dump()));
      settings.mask_small_gradients = value.get<bool>();
    } else if (key == "activation_grad_scale") {
      settings.activation_grad_scale_is_dp = value == "dp";
      if (value != "dp") settings.activation_grad_scale = scale_of(value, key, origin);
    } else if (key == "grad_scale") {
      settings.grad_scale = scale_of(value, key, origin);
    } else if (key == "partial") {
      settings.partial = patterns_of(value, key, origin);
    } else if (key == "max_grad_norm") {
      settings.max_grad_norm = number_of(value, key, origin);
    } else if (key == "num_names") {
      read_num_names(value, origin, settings);
    } else if (key == "collectives") {
      settings.collectives = run_calls_of(value, origin);
    } else {
      refuse_settings(
          origin, fmt::format("\"judging\" has no key \"{}\"; known are coarsest_dtype, "
                              "mask_small_gradients, activation_grad_scale, grad_scale, partial, "
                              "max_grad_norm, num_names, collectives",
                              key));
    }
  }
}

}  // namespace

nlohmann::json judging_json(const JudgePolicy& policy) {
  json judging = {{"coarsest_dtype", name_of(policy.coarsest)},
                  {"mask_small_gradients", policy.mask},
                  {"activation_grad_scale", policy.activation_grad_scale.value_or(1)},
                  {"max_grad_norm", policy.max_grad_norm},
                  {"num_names", policy.num_names}};
  if (policy.grad_scale.has_value()) judging["grad_scale"] = *policy.grad_scale;
  if (policy.partial.has_value()) judging["partial"] = *policy.partial;
  return judging;
}

RunSettings parse_run_settings(std::string_view text, const std::filesystem::path& origin) {
  const json parsed = json::parse(text, nullptr, false);
  if (!parsed.is_object()) refuse_settings(origin, "they must be a JSON object");
  RunSettings settings;
  for (const char* part : {"training", "judging"}) {
    if (parsed.contains(part) && !parsed.at(part).is_object())
      refuse_settings(
          origin, fmt::format("\"{}\" must be an object, got {}", part, parsed.at(part).dump()));
  }
  if (parsed.contains("training")) {
    Flattened training(origin);
    training.add(parsed.at("training"), "");
    settings.training = std::move(training).settings();
  }
  if (parsed.contains("judging")) read_judging(parsed.at("judging"), origin, settings);
  return settings;
}

std::optional<StepRule> step_rule_of(const RunSettings& settings) {
  const auto number = [&](const char* name) -> std::optional<double> {
    const auto found = settings.training.find(fmt::format("optimizer.{}", name));
    if (found == settings.training.end()) return std::nullopt;
    json value = json::parse(found->second, nullptr, false);
    // "1e-8", which YAML 1.1 takes for a text
    if (value.is_string()) value = json::parse(value.get<std::string>(), nullptr, false);
    return value.is_number() ? std::optional(value.get<double>()) : std::nullopt;
  };
  const auto rate = number("learning_rate"), decay = number("weight_decay"),
             beta1 = number("beta1"), beta2 = number("beta2"), eps = number("eps");
  if (!rate || !decay || !beta1 || !beta2 || !eps) return std::nullopt;
  return StepRule{*rate, *decay, *beta1, *beta2, *eps};
}

namespace {

/// Whether a run says that it read an input from a file, which another run may have saved: then the
/// input itself is what is compared.
bool is_from_file(const RunSettings& settings, const char* name, std::string_view source) {
  const auto found = settings.training.find(name);
  return found != settings.training.end() && found->second == source;
}

/// Settings that say where inputs came from, and nothing of a run whose inputs came from a file.
class Origins {
 public:
  Origins(const RunSettings& reference, const RunSettings& actual, BatchFileOf batch_file)
      : weights_(is_from_file(reference, "weights.source", "\"file\"") ||
                 is_from_file(actual, "weights.source", "\"file\"")),
        data_(is_from_batch_file(reference, actual, batch_file)) {}

  [[nodiscard]] bool cover(std::string_view name) const {
    if (name == "seed") return weights_ && data_;
    if (name.starts_with("weights.")) return weights_;
    for (const std::string_view of_data : {"data.source", "data.shuffle", "data.tail",
                                           "data.unequal_labels", "data.prompt_length"}) {
      if (name == of_data) return data_;
    }
    return false;
  }

 private:
  bool weights_, data_;
};

}  // namespace

SettingDifferences setting_differences(const RunSettings& reference, const RunSettings& actual,
                                       BatchFileOf batch_file) {
  SettingDifferences found;
  if (reference.training.empty() || actual.training.empty()) return found;
  const Origins origins(reference, actual, batch_file);
  const auto add_unshared = [&](const std::string& name, std::string line) {
    (is_environment_variable(name) ? found.different : found.unshared).push_back(std::move(line));
  };
  for (const auto& [name, value] : reference.training) {
    if (origins.cover(name)) continue;
    const auto other = actual.training.find(name);
    if (other == actual.training.end()) {
      add_unshared(name, fmt::format("{}: reference {}, actual does not say", name, value));
    } else if (!are_same_setting(other->second, value)) {
      found.different.push_back(
          fmt::format("{}: reference {}, actual {}", name, value, other->second));
    }
  }
  for (const auto& [name, value] : actual.training) {
    if (!reference.training.contains(name) && !origins.cover(name))
      add_unshared(name, fmt::format("{}: reference does not say, actual {}", name, value));
  }
  return found;
}

std::vector<std::string> differing_settings(const RunSettings& reference, const RunSettings& actual,
                                            BatchFileOf batch_file) {
  SettingDifferences found = setting_differences(reference, actual, batch_file);
  std::ranges::move(found.unshared, std::back_inserter(found.different));
  return std::move(found.different);
}

bool is_from_batch_file(const RunSettings& reference, const RunSettings& actual,
                        BatchFileOf batch_file) {
  const auto says = [](const RunSettings& settings) {
    return is_from_file(settings, "data.source", "\"batch file\"");
  };
  return says(reference) || (batch_file == BatchFileOf::kEither && says(actual));
}

}  // namespace isoshard
