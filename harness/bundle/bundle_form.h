// SPDX-License-Identifier: Apache-2.0
/// How readers of bundles say that a file has not the form of one.
#pragma once
#include <filesystem>
#include <string_view>

#include "harness/ids/rule.h"

namespace isoshard::detail {

/// Throws a FileError "FILE: PROBLEM" by the rule file_form.
[[noreturn]] inline void refuse_form(const std::filesystem::path& file, std::string_view problem) {
  refuse(file, RuleId::kFileForm, {{"problem", problem}});
}

}  // namespace isoshard::detail
