// SPDX-License-Identifier: Apache-2.0
/// Strict access to the fields of a JSON object: what is missing or of a wrong type is an error
/// that names the field.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace isoshard {

/// A view of one object in a configuration file.
///
/// Requires   the json outlives the view.
/// Errors     every function throws FileError "<origin>: <field> ..." with the value found and what
///            is expected. A field that is null counts as missing.
class ConfigFields {
 public:
  ConfigFields(const nlohmann::json& object, std::string_view origin, std::string_view prefix = "");

  [[nodiscard]] bool has(const char* field) const;
  [[nodiscard]] std::int64_t positive_integer(const char* field) const;
  /// From 1 to kMaxLayers.
  [[nodiscard]] std::int64_t num_layers(const char* field) const;
  [[nodiscard]] double positive_number(const char* field) const;
  [[nodiscard]] double non_negative_number(const char* field) const;
  [[nodiscard]] bool boolean(const char* field) const;
  /// `fallback` if the field is missing: for switches that published files leave out.
  [[nodiscard]] bool boolean(const char* field, bool fallback) const {
    return has(field) ? boolean(field) : fallback;
  }
  [[nodiscard]] std::string text(const char* field) const;
  [[nodiscard]] ConfigFields object(const char* field) const;
  [[nodiscard]] const nlohmann::json& value(const char* field) const;
  [[noreturn]] void fail(std::string_view field, std::string_view problem) const;

 private:
  [[nodiscard]] double number(const char* field, std::string_view expected) const;

  const nlohmann::json* object_;
  std::string origin_;
  std::string prefix_;
};

}  // namespace isoshard
