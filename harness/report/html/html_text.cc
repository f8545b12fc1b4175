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
  return escaped(parts::word_in(object, name));
}

std::string short_number(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e6) return fmt::format("{:.0f}", value);
  return fmt::format("{:.3g}", value);
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

}  // namespace isoshard::html
