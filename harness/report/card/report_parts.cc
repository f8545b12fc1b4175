// SPDX-License-Identifier: Apache-2.0
// Parts of JSON that others may have written.
#include "harness/report/card/report_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

namespace isoshard::parts {

std::string word_in(const nlohmann::json& object, const char* name) {
  const nlohmann::json& part = part_in(object, name);
  return part.is_string() ? part.get<std::string>() : "";
}

double number_of(const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) return 0;
  if (found->is_number()) return found->get<double>();
  if (!found->is_string()) return 0;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto& word = found->get_ref<const std::string&>();
  if (word == "inf") return kInfinity;
  return word == "-inf" ? -kInfinity : std::numeric_limits<double>::quiet_NaN();
}

const nlohmann::json& list_of(const nlohmann::json& object, const char* name) {
  static const nlohmann::json kNone = nlohmann::json::array();
  const nlohmann::json& part = part_in(object, name);
  return part.is_array() ? part : kNone;
}

const nlohmann::json& part_in(const nlohmann::json& object, const char* name) {
  static const nlohmann::json kNone;
  if (!object.is_object()) return kNone;
  const auto found = object.find(name);
  return found == object.end() ? kNone : *found;
}

std::vector<double> numbers_in(const nlohmann::json& object, const char* name) {
  std::vector<double> numbers;
  for (const nlohmann::json& value : list_of(object, name))
    numbers.push_back(value.is_number() ? value.get<double>()
                                        : std::numeric_limits<double>::quiet_NaN());
  return numbers;
}

bool is_same_tensor(const nlohmann::json& a, const nlohmann::json& b) {
  for (const char* const key : {"step", "kind", "name", "call"})
    if (part_in(a, key) != part_in(b, key)) return false;
  return true;
}

std::string row_of(const nlohmann::json& tensor) {
  const std::string kind = tensor.value("kind", std::string());
  constexpr std::array<std::string_view, 6> kOfParts = {"activation", "activation_grad", "param",
                                                        "grad",       "optimizer",       "mask"};
  if (std::ranges::find(kOfParts, kind) == kOfParts.end()) return "whole step";
  const std::string name = tensor.value("name", std::string());
  for (const std::string_view list : {"layers.", "h."}) {
    const std::size_t at = name.find(list);
    if (at == name.npos || (at > 0 && name[at - 1] != '.')) continue;
    const std::size_t begin = at + list.size();
    std::size_t end = begin;
    while (end < name.size() && name[end] >= '0' && name[end] <= '9') ++end;
    if (end > begin && end - begin <= 6) return "layer " + name.substr(begin, end - begin);
  }
  for (const std::string_view word : {"embed", "wte", "wpe", "transformer.drop"})
    if (name.find(word) != name.npos) return "before the layers";
  return "after the layers";
}

std::string rank_in_words(const nlohmann::json& item, int rank) {
  std::string place;
  int rest = rank;
  const nlohmann::json& mesh = list_of(item, "mesh");
  for (auto axis = mesh.rbegin(); axis != mesh.rend(); ++axis) {  // the last one varies fastest
    const int degree = static_cast<int>(number_of(*axis, "degree"));
    if (degree < 1) return fmt::format("rank {}", rank);
    if (degree > 1) {
      place = fmt::format("{} {}{}{}", word_in(*axis, "axis"), rest % degree,
                          place.empty() ? "" : ", ", place);
    }
    rest /= degree;
  }
  return place.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {} ({})", rank, place);
}

}  // namespace isoshard::parts
