// SPDX-License-Identifier: Apache-2.0
/// Folders that commands write to.
#pragma once
#include <filesystem>
#include <string_view>

namespace isoshard {

/// Makes the folder if needed and proves that a file can be made in it, before any rank starts.
/// Errors   UsageError that names the folder and why: it is a file, read-only, or its parent is missing.
void require_writable_folder(const std::filesystem::path& folder, std::string_view option);

}  // namespace isoshard
