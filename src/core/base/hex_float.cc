// SPDX-License-Identifier: Apache-2.0
// Hex floats by their bits: independent of locale and of the C library's printf.
#include "core/base/hex_float.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace isoshard {
namespace {

constexpr std::uint64_t kFractionMask = (std::uint64_t{1} << 52) - 1;
constexpr int kMaxExponentDigits = 5;
constexpr int kMaxFractionDigits = 13;

/// The value of a hex digit, or -1.
int digit_of(char c) noexcept {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool take(std::string_view& text, char lower) noexcept {
  if (text.empty() || (text.front() | 0x20) != lower) return false;
  text.remove_prefix(1);
  return true;
}

std::optional<int> take_exponent(std::string_view text) noexcept {
  if (text.empty() || (text.front() != '+' && text.front() != '-')) return std::nullopt;
  const bool negative = text.front() == '-';
  text.remove_prefix(1);
  if (text.empty() || text.size() > kMaxExponentDigits) return std::nullopt;
  int exponent = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    exponent = 10 * exponent + (c - '0');
  }
  return negative ? -exponent : exponent;
}

/// mantissa * 2^exponent, or nothing if that overflows or loses bits.
std::optional<double> exact_scale(std::uint64_t mantissa, int exponent) noexcept {
  const double whole = static_cast<double>(mantissa);  // at most 53 bits: exact
  const double value = std::ldexp(whole, exponent);
  if (!std::isfinite(value) || std::ldexp(value, -exponent) != whole) return std::nullopt;
  return value;
}

}  // namespace

std::string to_hex(double value) {
  if (std::isnan(value)) return "nan";
  const char* sign = std::signbit(value) ? "-" : "";
  if (std::isinf(value)) return fmt::format("{}inf", sign);
  if (value == 0.0) return fmt::format("{}0x0.0p+0", sign);
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const int biased = static_cast<int>((bits >> 52) & 0x7ff);
  const int exponent = biased == 0 ? -1022 : biased - 1023;
  return fmt::format("{}0x{}.{:013x}p{:+d}", sign, biased == 0 ? 0 : 1, bits & kFractionMask,
                     exponent);
}

std::optional<double> parse_hex(std::string_view text) {
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  const bool negative = text.starts_with('-');
  if (negative) text.remove_prefix(1);
  const double sign = negative ? -1.0 : 1.0;
  if (text == "inf") return sign * std::numeric_limits<double>::infinity();
  if (!text.starts_with('0')) return std::nullopt;
  text.remove_prefix(1);
  if (!take(text, 'x') || text.empty() || (text.front() != '0' && text.front() != '1'))
    return std::nullopt;
  std::uint64_t mantissa = static_cast<std::uint64_t>(text.front() - '0');
  text.remove_prefix(1);
  int fraction_digits = 0;
  if (text.starts_with('.')) {
    text.remove_prefix(1);
    for (; !text.empty() && digit_of(text.front()) >= 0; text.remove_prefix(1)) {
      if (++fraction_digits > kMaxFractionDigits) return std::nullopt;
      mantissa = 16 * mantissa + static_cast<std::uint64_t>(digit_of(text.front()));
    }
    if (fraction_digits == 0) return std::nullopt;
  }
  if (!take(text, 'p')) return std::nullopt;
  const std::optional<int> exponent = take_exponent(text);
  if (!exponent) return std::nullopt;
  const std::optional<double> magnitude = exact_scale(mantissa, *exponent - 4 * fraction_digits);
  if (!magnitude) return std::nullopt;
  return sign * *magnitude;
}

}  // namespace isoshard
