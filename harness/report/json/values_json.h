// SPDX-License-Identifier: Apache-2.0
/// Values of ids (harness/ids) as JSON, and back.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>

#include "harness/ids/named_values.h"

namespace isoshard {

/// A number, a word, or a list of one kind. Numbers that JSON does not have are words
/// (json_number).
[[nodiscard]] nlohmann::json value_json(const IdValue& value);

/// The value that value_json() wrote. Numbers that JSON does not have stay words. Nothing for a
/// bool, null, an object or a list of several kinds; an empty list is one of whole numbers.
[[nodiscard]] std::optional<IdValue> read_value(const nlohmann::json& given);

}  // namespace isoshard
