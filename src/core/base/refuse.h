// SPDX-License-Identifier: Apache-2.0
/// How readers of files say what is wrong with one.
#pragma once
#include <fmt/format.h>

#include <filesystem>
#include <string_view>

#include "core/base/error.h"

namespace isoshard {

/// Throws a FileError "PATH: WHAT".
[[noreturn]] inline void refuse(const std::filesystem::path& file, std::string_view what) {
  throw FileError(fmt::format("{}: {}", file.string(), what));
}

}  // namespace isoshard
