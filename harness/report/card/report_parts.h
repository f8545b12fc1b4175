// SPDX-License-Identifier: Apache-2.0
/// Reads the parts of a report.json, whatever is in it: a part that is not there is empty.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace isoshard::parts {

/// A string field as it is; "" where there is none or null.
[[nodiscard]] std::string word_in(const nlohmann::json& object, const char* name);
/// A number field, also of the words "nan", "inf" and "-inf"; 0 where there is none.
[[nodiscard]] double number_of(const nlohmann::json& object, const char* name);

/// A list or member of an object; an empty list or null where there is none.
[[nodiscard]] const nlohmann::json& list_of(const nlohmann::json& object, const char* name);
[[nodiscard]] const nlohmann::json& part_in(const nlohmann::json& object, const char* name);
/// The numbers of a list, NaN for anything else.
[[nodiscard]] std::vector<double> numbers_in(const nlohmann::json& object, const char* name);
/// Whether step, kind, name and call are equal.
[[nodiscard]] bool is_same_tensor(const nlohmann::json& a, const nlohmann::json& b);

/// "layer 3" of "model.layers.3.mlp.down_proj.weight"; otherwise "before the layers", "after the
/// layers" or "whole step".
[[nodiscard]] std::string row_of(const nlohmann::json& tensor);
/// "rank 3 (dp 1, tp 1)" of a case with a mesh.
[[nodiscard]] std::string rank_in_words(const nlohmann::json& item, int rank);

}  // namespace isoshard::parts
