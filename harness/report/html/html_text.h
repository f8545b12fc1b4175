// SPDX-License-Identifier: Apache-2.0
/// Text and numbers in HTML; internal to html.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "harness/report/card/report_parts.h"

namespace isoshard::html {

using parts::is_same_tensor;
using parts::list_of;
using parts::number_of;
using parts::numbers_in;
using parts::part_in;
using parts::row_of;

/// Characters that mean something in HTML, and control characters, as references.
[[nodiscard]] std::string escaped(std::string_view text);
/// A string field, escaped; "" where there is none or null.
[[nodiscard]] std::string text_of(const nlohmann::json& object, const char* name);
/// "1.2e-05", "3", "nan".
[[nodiscard]] std::string short_number(double value);

/// A table that scrolls by itself where it is too wide, with its caption.
[[nodiscard]] std::string begin_table(const std::string& caption);
[[nodiscard]] std::string end_table();

/// The class of a cell, by how much of what is allowed is used.
[[nodiscard]] std::string_view class_of_share(double share);

/// How much of what is allowed of a tensor is used: 0 for equal bits, above 1 for what diverges.
[[nodiscard]] double share_of_allowed(const nlohmann::json& tensor);

/// The style sheet of the page.
[[nodiscard]] std::string_view style_sheet();

}  // namespace isoshard::html
