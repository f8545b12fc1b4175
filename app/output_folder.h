// SPDX-License-Identifier: Apache-2.0
/// Folders that commands write to.
#pragma once
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string_view>

namespace isoshard {

/// Makes the folder if needed and proves that a file can be made in it, before any rank starts.
/// Errors   UsageError that names the folder and why: it is a file, read-only, or its parent is missing.
void require_writable_folder(const std::filesystem::path& folder, std::string_view option);

/// Writes report.json (schema 1, the exit code, one entry a case, one a table) and report.txt; nothing if `folder` is empty.
/// Errors   as write_file_atomically.
void write_reports(const std::filesystem::path& folder, int exit_code, const nlohmann::json& cases, const nlohmann::json& tables,
                   std::string_view text);

}  // namespace isoshard
