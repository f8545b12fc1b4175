// SPDX-License-Identifier: Apache-2.0
/// One vocabulary of training settings: what programs call alike stands under one name and value.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace isoshard {

/// The name that docs/reference/bundle.md gives a setting: "optimizer.lr" is
/// "optimizer.learning_rate". A name that is not known stays.
[[nodiscard]] std::string canonical_setting(std::string_view name);

/// The value of a setting under its canonical name, as JSON text: dtypes by their short names
/// ("torch.float32" is "fp32"), and kinds of optimizers in lower case without a module's name
/// ("torch.optim.AdamW" is "adamw").
[[nodiscard]] std::string canonical_value(std::string_view name, const nlohmann::json& value);

/// Whether two values, as JSON text, are the same: 2.0 and 2 are.
[[nodiscard]] bool are_same_setting(const std::string& a, const std::string& b);

/// Whether the setting is an environment variable ("transformer_engine.NVTE_FUSED_ATTN"): that it
/// is not set is a value, too.
[[nodiscard]] bool is_environment_variable(std::string_view name);

}  // namespace isoshard
