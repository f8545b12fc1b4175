// SPDX-License-Identifier: Apache-2.0
/// The table of aliases.
#include "harness/bundle/setting_names.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <nlohmann/json.hpp>

#include "core/base/dtype.h"
#include "core/base/error.h"

namespace isoshard {
namespace {

struct Alias {
  std::string_view alias, name;
};

constexpr std::array kAliases{Alias{"torch_dtype", "dtype"},
                              Alias{"params_dtype", "dtype"},
                              Alias{"precision", "dtype"},
                              Alias{"optimizer.name", "optimizer.kind"},
                              Alias{"optimizer.type", "optimizer.kind"},
                              Alias{"optimizer.lr", "optimizer.learning_rate"},
                              Alias{"learning_rate", "optimizer.learning_rate"},
                              Alias{"lr", "optimizer.learning_rate"},
                              Alias{"weight_decay", "optimizer.weight_decay"},
                              Alias{"optimizer.adam_beta1", "optimizer.beta1"},
                              Alias{"optimizer.adam_beta2", "optimizer.beta2"},
                              Alias{"optimizer.adam_eps", "optimizer.eps"},
                              Alias{"optimizer.adam_epsilon", "optimizer.eps"},
                              Alias{"clip_grad", "max_grad_norm"},
                              Alias{"clip_grad_norm", "max_grad_norm"},
                              Alias{"gradient_clipping", "max_grad_norm"}};

std::string last_of(std::string_view name, char separator) {
  return std::string(name.substr(name.rfind(separator) + 1));
}

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

}  // namespace

std::string canonical_setting(std::string_view name) {
  const auto* const found = std::ranges::find(kAliases, name, &Alias::alias);
  return std::string(found == kAliases.end() ? name : found->name);
}

std::string canonical_value(std::string_view name, const nlohmann::json& value) {
  if (!value.is_string()) return value.dump();
  const auto text = value.get<std::string>();
  if (name == "optimizer.kind") return nlohmann::json(lower(last_of(text, '.'))).dump();
  if (last_of(name, '.').ends_with("dtype")) {
    try {
      return nlohmann::json(name_of(parse_dtype(lower(text)))).dump();
    } catch (const UsageError&) {
      return value.dump();  // a dtype of somebody else's
    }
  }
  return value.dump();
}

bool are_same_setting(const std::string& a, const std::string& b) {
  if (a == b) return true;
  const auto one = nlohmann::json::parse(a, nullptr, false);
  const auto other = nlohmann::json::parse(b, nullptr, false);
  return one.is_number() && other.is_number() && one.get<double>() == other.get<double>();
}

bool is_environment_variable(std::string_view name) {
  const std::string last = last_of(name, '.');
  return last.find('_') != std::string::npos && std::ranges::all_of(last, [](unsigned char c) {
           return std::isupper(c) != 0 || std::isdigit(c) != 0 || c == '_';
         });
}

}  // namespace isoshard
