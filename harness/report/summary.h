// SPDX-License-Identifier: Apache-2.0
/// The closing line of a report: how many parts conform, how strongly, and what the others are.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>

#include "harness/report/report.h"

namespace isoshard {

/// "3 of 3 cases conform (2 exact, 1 within tolerance)", "1 of 3 cases conforms (exact), 1 diverges
/// (autotp qwen2_tp2), 1 incomplete (ddp qwen2_dp2)". Curves that nothing was compared with do not
/// count.
/// `total`   how many there were to judge.   `one`   what each is called.
[[nodiscard]] std::string summary_of(const Report& report, std::size_t total,
                                     std::string_view one = "case");
/// Of a report that has all parts.
[[nodiscard]] std::string summary_of(const Report& report, std::string_view one = "case");

/// "0.42 s", "41 s", "12 min".
[[nodiscard]] std::string seconds_in_words(double seconds);

}  // namespace isoshard
