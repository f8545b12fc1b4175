// SPDX-License-Identifier: Apache-2.0
/// Text and numbers in HTML; internal to html.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace isoshard::html {

/// Characters that mean something in HTML, and control characters, as references.
[[nodiscard]] std::string escaped(std::string_view text);
/// A string field, escaped; "" where there is none or null.
[[nodiscard]] std::string text_of(const nlohmann::json& object, const char* name);
/// A number field, also of the words "nan", "inf" and "-inf"; 0 where there is none.
[[nodiscard]] double number_of(const nlohmann::json& object, const char* name);
/// "1.2e-05", "3", "nan".
[[nodiscard]] std::string short_number(double value);

/// A list or member of an object; an empty list or null where there is none.
[[nodiscard]] const nlohmann::json& list_of(const nlohmann::json& object, const char* name);
[[nodiscard]] const nlohmann::json& part_in(const nlohmann::json& object, const char* name);
/// The numbers of a list, NaN for anything else.
[[nodiscard]] std::vector<double> numbers_in(const nlohmann::json& object, const char* name);
/// Whether step, kind, name and call are equal.
[[nodiscard]] bool is_same_tensor(const nlohmann::json& a, const nlohmann::json& b);

/// A table that scrolls by itself where it is too wide, with its caption.
[[nodiscard]] std::string begin_table(const std::string& caption);
[[nodiscard]] std::string end_table();

/// The class of a cell, by how much of what is allowed is used.
[[nodiscard]] std::string_view class_of_share(double share);

/// How much of what is allowed of a tensor is used: 0 for equal bits, above 1 for what diverges.
[[nodiscard]] double share_of_allowed(const nlohmann::json& tensor);

/// "layer 3" of "model.layers.3.mlp.down_proj.weight"; otherwise "before the layers", "after the
/// layers" or "whole step".
[[nodiscard]] std::string row_of(const nlohmann::json& tensor);

/// The style sheet of the page.
[[nodiscard]] std::string_view style_sheet();

}  // namespace isoshard::html
