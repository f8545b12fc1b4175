// SPDX-License-Identifier: Apache-2.0
// One case for each type that a value has.
#include "harness/report/json/values_json.h"

#include <algorithm>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "harness/report/json/json_number.h"

namespace isoshard {

using nlohmann::json;

json value_json(const IdValue& value) {
  return std::visit(
      [](const auto& held) -> json {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, double>) {
          return json_number(held);
        } else if constexpr (std::is_same_v<T, std::vector<double>>) {
          json list = json::array();
          for (const double number : held) list.push_back(json_number(number));
          return list;
        } else {
          return held;
        }
      },
      value);
}

std::optional<IdValue> read_value(const json& given) {
  if (given.is_number_integer()) return given.get<std::int64_t>();
  if (given.is_number()) return given.get<double>();
  if (given.is_string()) return given.get<std::string>();
  if (!given.is_array()) return std::nullopt;
  const auto is_all = [&](bool (json::*is)() const noexcept) {
    return std::ranges::all_of(given, [is](const json& one) { return (one.*is)(); });
  };
  if (is_all(&json::is_number_integer)) return given.get<std::vector<std::int64_t>>();
  if (is_all(&json::is_number)) return given.get<std::vector<double>>();
  if (is_all(&json::is_string)) return given.get<std::vector<std::string>>();
  return std::nullopt;
}

}  // namespace isoshard
