// SPDX-License-Identifier: Apache-2.0
/// Configurations that have a name: no file is needed for them.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "subjects/model/config/config.h"

namespace isoshard {

/// small, tiny and tiny-TYPE (of the fault catalogue, one of each architecture), tiny-gqa (4 kv
/// heads), tiny-gqa-kv2 (2) and tiny-tied-gqa (2, tied), whose sizes 3 does not divide, and
/// published models by their Hugging Face name, with or without its organization; letter case does
/// not count.
/// Errors   UsageError with a suggestion and the names.
[[nodiscard]] ModelConfig builtin_config(std::string_view name);

[[nodiscard]] std::vector<std::string> builtin_names();

}  // namespace isoshard
