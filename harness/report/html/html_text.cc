// SPDX-License-Identifier: Apache-2.0
// What the parts of the page have in common.
#include "harness/report/html/html_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace isoshard::html {

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\n':
      case '\t':
        result += c;
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
        } else {
          result += c;
        }
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

std::string_view style_sheet() {
  return R"(
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--paper:#fff;--line:#d0d7de;
--card:#f6f8fa;
--good:#116329;--bad:#a40e26;--doubt:#7d4e00;--link:#0550ae}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa4ae;--paper:#0d1117;
--line:#3d444d;
--card:#161b22;--good:#56d364;--bad:#ff8b85;--doubt:#e3b341;--link:#79c0ff}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem;max-width:70rem;font:1rem/1.5 system-ui,sans-serif;
color:var(--ink);
background:var(--paper)}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem}h3{font-size:1rem}
code,pre,.name{font-family:ui-monospace,monospace;font-size:.875rem;overflow-wrap:anywhere}
pre{white-space:pre-wrap;background:var(--card);border:1px solid var(--line);padding:.75rem}
.verdict{border-left:.4rem solid;padding:.5rem 1rem;background:var(--card)}
.conforms,.match,.accepted,.reviewed{color:var(--good)}
.diverges,.regression,.refused{color:var(--bad)}
.vacuous,.incomplete,.drift,.pending,.removed{color:var(--doubt)}
.verdict p,.verdict dl{color:var(--ink);margin:.25rem 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}dd{margin:0}
dt{color:var(--soft)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.875rem}
caption{text-align:left;color:var(--soft);padding:.25rem 0}
th,td{border:1px solid var(--line);padding:.2rem .5rem;text-align:right}
td{white-space:nowrap}
th[scope=row],td.name,th.name{text-align:left;white-space:normal}
.s0{background:#e7f5ea;color:#10301a}.s1{background:#fff3bf;color:#3a2c00}
.s2{background:#ffd8a8;color:#40210a}.s3{background:#a40e26;color:#fff;font-weight:700}
.here{outline:.2rem solid var(--bad);outline-offset:-.2rem}
svg{max-width:100%;height:auto;background:var(--card);border:1px solid var(--line)}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}
summary{cursor:pointer;padding:.25rem 0}
a{color:var(--link)}
@media print{body{max-width:none;padding:0}details{break-inside:avoid}
details:not([open])>*{display:block}.s0,.s1,.s2,.s3{print-color-adjust:exact}}
)";
}

}  // namespace isoshard::html
