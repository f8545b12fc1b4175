// SPDX-License-Identifier: Apache-2.0
/// Test helper: a validator for the JSON schemas of docs/.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>

namespace isoshard {

/// The keywords of draft 2020-12 that the schema uses; any other makes the validator fail, so that
/// none is there in vain.
class Schema {
 public:
  explicit Schema(nlohmann::json root) : root_(std::move(root)) {}

  /// What is wrong with `value`, with its place; empty if nothing is.
  [[nodiscard]] std::string problem(const nlohmann::json& value) const {
    return problem(root_, value, "$");
  }

 private:
  static bool has_type(const nlohmann::json& value, const std::string& type) {
    if (type == "object") return value.is_object();
    if (type == "array") return value.is_array();
    if (type == "string") return value.is_string();
    if (type == "boolean") return value.is_boolean();
    if (type == "null") return value.is_null();
    if (type == "number") return value.is_number();
    if (type == "integer")
      return value.is_number_integer() ||
             (value.is_number() && std::floor(value.get<double>()) == value.get<double>());
    throw std::invalid_argument("the schema names the type " + type);
  }

  [[nodiscard]] std::string problem(const nlohmann::json& schema, const nlohmann::json& value,
                                    const std::string& at) const {
    if (schema.is_boolean()) return schema.get<bool>() ? "" : at + " is not allowed";
    for (const auto& [keyword, rule] : schema.items()) {
      std::string wrong = keyword_problem(schema, keyword, rule, value, at);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  [[nodiscard]] std::string keyword_problem(const nlohmann::json& schema,
                                            const std::string& keyword, const nlohmann::json& rule,
                                            const nlohmann::json& value,
                                            const std::string& at) const {
    if (keyword == "$schema" || keyword == "$id" || keyword == "title" ||
        keyword == "description" || keyword == "$defs")
      return "";
    if (keyword == "$ref")
      return problem(root_.at(nlohmann::json::json_pointer(rule.get<std::string>().substr(1))),
                     value, at);
    if (keyword == "type") {
      const nlohmann::json types = rule.is_array() ? rule : nlohmann::json::array({rule});
      const bool fits = std::any_of(types.begin(), types.end(), [&](const nlohmann::json& type) {
        return has_type(value, type);
      });
      return fits ? "" : fmt::format("{} is {}, not {}", at, value.type_name(), rule.dump());
    }
    if (keyword == "const")
      return value == rule ? "" : fmt::format("{} is not {}", at, rule.dump());
    if (keyword == "enum")
      return std::find(rule.begin(), rule.end(), value) != rule.end()
                 ? ""
                 : fmt::format("{} is {}, none of {}", at, value.dump(), rule.dump());
    if (keyword == "minimum")
      return !value.is_number() || value >= rule ? ""
                                                 : fmt::format("{} is below {}", at, rule.dump());
    if (keyword == "maximum")
      return !value.is_number() || value <= rule ? ""
                                                 : fmt::format("{} is above {}", at, rule.dump());
    if (keyword == "minItems" || keyword == "maxItems") {
      const bool fits =
          !value.is_array() || (keyword == "minItems" ? value.size() >= rule.get<std::size_t>()
                                                      : value.size() <= rule.get<std::size_t>());
      return fits ? "" : fmt::format("{} has {} items", at, value.size());
    }
    if (keyword == "anyOf") return any_of_problem(rule, value, at);
    if (keyword == "items") return items_problem(rule, value, at);
    if (keyword == "required") return required_problem(rule, value, at);
    if (keyword == "properties" || keyword == "additionalProperties")
      return keyword == "properties" ? properties_problem(schema, value, at)
                                     : additional_problem(schema, value, at);
    throw std::invalid_argument("the schema has the unknown keyword " + keyword);
  }

  [[nodiscard]] std::string any_of_problem(const nlohmann::json& choices,
                                           const nlohmann::json& value,
                                           const std::string& at) const {
    std::string all;
    for (const nlohmann::json& choice : choices) {
      const std::string wrong = problem(choice, value, at);
      if (wrong.empty()) return "";
      all += (all.empty() ? "" : " and ") + wrong;
    }
    return all;
  }
  [[nodiscard]] std::string items_problem(const nlohmann::json& rule, const nlohmann::json& value,
                                          const std::string& at) const {
    if (!value.is_array()) return "";
    for (std::size_t i = 0; i < value.size(); ++i) {
      std::string wrong = problem(rule, value[i], fmt::format("{}[{}]", at, i));
      if (!wrong.empty()) return wrong;
    }
    return "";
  }
  [[nodiscard]] static std::string required_problem(const nlohmann::json& rule,
                                                    const nlohmann::json& value,
                                                    const std::string& at) {
    if (!value.is_object()) return "";
    for (const nlohmann::json& name : rule) {
      if (!value.contains(name.get<std::string>()))
        return fmt::format("{} has no {}", at, name.dump());
    }
    return "";
  }
  [[nodiscard]] std::string properties_problem(const nlohmann::json& schema,
                                               const nlohmann::json& value,
                                               const std::string& at) const {
    if (!value.is_object()) return "";
    for (const auto& [name, rule] : schema.at("properties").items()) {
      if (!value.contains(name)) continue;
      std::string wrong = problem(rule, value.at(name), at + "." + name);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }
  [[nodiscard]] std::string additional_problem(const nlohmann::json& schema,
                                               const nlohmann::json& value,
                                               const std::string& at) const {
    if (!value.is_object()) return "";
    for (const auto& [name, member] : value.items()) {
      if (schema.contains("properties") && schema.at("properties").contains(name)) continue;
      std::string wrong = problem(schema.at("additionalProperties"), member, at + "." + name);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  nlohmann::json root_;
};

}  // namespace isoshard
