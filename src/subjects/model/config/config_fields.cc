// SPDX-License-Identifier: Apache-2.0
// Strict access to the fields of a JSON object.
#include "subjects/model/config/config_fields.h"

#include <fmt/format.h>

#include <cmath>

#include "core/base/error.h"
#include "subjects/model/config/limits.h"

namespace isoshard {
namespace {

std::string shown(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() > 60) text.replace(57, std::string::npos, "...");
  return text;
}

}  // namespace

ConfigFields::ConfigFields(const nlohmann::json& object, std::string_view origin,
                           std::string_view prefix)
    : object_(&object), origin_(origin), prefix_(prefix) {
  if (!object.is_object())
    throw FileError(fmt::format("{}: must be a JSON object, got {}", origin, shown(object)));
}

bool ConfigFields::has(const char* field) const {
  const auto found = object_->find(field);
  return found != object_->end() && !found->is_null();
}

const nlohmann::json& ConfigFields::value(const char* field) const {
  const auto found = object_->find(field);
  if (found == object_->end()) fail(field, "is missing");
  if (found->is_null()) fail(field, "is null; give a value");
  return *found;
}

std::int64_t ConfigFields::positive_integer(const char* field) const {
  // products of two sizes must not overflow
  constexpr std::int64_t kLargest = std::int64_t{1} << 40;
  const nlohmann::json& found = value(field);
  if (!found.is_number_integer())
    fail(field, fmt::format("must be an integer, got {}", shown(found)));
  const bool too_large = found.is_number_unsigned() &&
                         found.get<std::uint64_t>() > static_cast<std::uint64_t>(kLargest);
  if (too_large || found.get<std::int64_t>() < 1 || found.get<std::int64_t>() > kLargest) {
    fail(field, fmt::format("must be an integer from 1 to {}, got {}", kLargest, shown(found)));
  }
  return found.get<std::int64_t>();
}

std::int64_t ConfigFields::num_layers(const char* field) const {
  const std::int64_t layers = positive_integer(field);
  if (layers > kMaxLayers)
    fail(field, fmt::format("must be at most {} layers, got {}", kMaxLayers, layers));
  return layers;
}

double ConfigFields::number(const char* field, std::string_view expected) const {
  const nlohmann::json& found = value(field);
  if (!found.is_number() || !std::isfinite(found.get<double>()))
    fail(field, fmt::format("must be {}, got {}", expected, shown(found)));
  return found.get<double>();
}

double ConfigFields::positive_number(const char* field) const {
  const double result = number(field, "a positive number");
  if (!(result > 0)) fail(field, fmt::format("must be a positive number, got {}", result));
  return result;
}

double ConfigFields::non_negative_number(const char* field) const {
  const double result = number(field, "a number >= 0");
  if (!(result >= 0)) fail(field, fmt::format("must be a number >= 0, got {}", result));
  return result;
}

bool ConfigFields::boolean(const char* field) const {
  const nlohmann::json& found = value(field);
  if (!found.is_boolean()) fail(field, fmt::format("must be true or false, got {}", shown(found)));
  return found.get<bool>();
}

std::string ConfigFields::text(const char* field) const {
  const nlohmann::json& found = value(field);
  if (!found.is_string()) fail(field, fmt::format("must be a string, got {}", shown(found)));
  return found.get<std::string>();
}

ConfigFields ConfigFields::object(const char* field) const {
  const nlohmann::json& found = value(field);
  if (!found.is_object()) fail(field, fmt::format("must be an object, got {}", shown(found)));
  return {found, origin_, prefix_ + field + "."};
}

void ConfigFields::fail(std::string_view field, std::string_view problem) const {
  throw FileError(fmt::format("{}: {}{} {}", origin_, prefix_, field, problem));
}

}  // namespace isoshard
