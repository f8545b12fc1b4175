// SPDX-License-Identifier: Apache-2.0
/// Exact text for floating-point numbers, as Python's float.hex() writes it.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace isoshard {

/// "0x1.0dd2520000000p+3", "-0x0.0p+0", "0x0.0000000000001p-1022", "inf", "-inf", "nan"; thirteen
/// digits, as Python. A float is widened first, which is exact.
[[nodiscard]] std::string to_hex(double value);

/// Reads what to_hex and float.hex() write: [-]0xD[.D{1,13}]p(+|-)D{1,5} with D = 0 or 1 before the
/// point, or inf, -inf, nan. Letters may be of either case. Nothing if the text is anything else,
/// or if no double has exactly that value.
[[nodiscard]] std::optional<double> parse_hex(std::string_view text);

}  // namespace isoshard
