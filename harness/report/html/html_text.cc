// SPDX-License-Identifier: Apache-2.0
// What the parts of the page have in common.
#include "harness/report/html/html_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/base/printable.h"

namespace isoshard::html {

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (const std::string_view entity = entity_of(c); !entity.empty()) {
      result += entity;
    } else if (c != '\n' && c != '\t' && (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      result += c;
    }
  }
  return result;
}

std::string text_of(const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || !found->is_string()
             ? ""
             : escaped(found->get_ref<const std::string&>());
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

std::string short_number(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e6) return fmt::format("{:.0f}", value);
  return fmt::format("{:.3g}", value);
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

std::string begin_table(const std::string& caption) {
  return fmt::format(
      "<div class=scroll tabindex=0 role=region aria-label=\"{0}\"><table><caption>{0}</caption>\n",
      caption);
}

std::string end_table() {
  return "</tbody></table></div>\n";
}

std::string_view class_of_share(double share) {
  if (!(share <= 1)) return "s3";
  if (share > 0.5) return "s2";
  return share > 0.1 ? "s1" : "s0";
}

double share_of_allowed(const nlohmann::json& tensor) {
  const auto ratio = [](double used, double allowed) {
    if (used == 0) return 0.0;
    return allowed > 0 ? used / allowed : std::numeric_limits<double>::infinity();
  };
  constexpr double kOutside = 1.01;  // whatever the numbers of the tensor as a whole are
  const bool is_within = tensor.value("within", false);
  if (number_of(tensor, "nonfinite_mismatch") > 0) return std::numeric_limits<double>::infinity();
  if (number_of(tensor, "unequal") == 0) return is_within ? 0 : kOutside;
  double share =
      ratio(number_of(tensor, "relative_error"), number_of(tensor, "allowed_relative_error"));
  if (tensor.value("insensitive", false)) {
    share = ratio(number_of(tensor, "relative_error") * number_of(tensor, "norm_reference"),
                  number_of(tensor, "allowed_absolute"));
  }
  return is_within ? std::min(share, 1.0) : std::max(share, kOutside);
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

}  // namespace isoshard::html
