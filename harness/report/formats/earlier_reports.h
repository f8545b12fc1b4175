// SPDX-License-Identifier: Apache-2.0
/// Reports that an earlier run left where a run is about to write its own.
///
/// A run that is killed writes none. So that nobody takes the earlier one for its own, that is
/// called NAME.old from the start of a run until its own report is written, and removed then.
#pragma once
#include <filesystem>

namespace isoshard {

/// Renames `file` to NAME.old; nothing if it is not there.
/// Errors   UsageError that names the file and the system's reason.
void set_aside(const std::filesystem::path& file);
/// The usual formats of write_report, in `folder`; nothing if it is empty.
void set_aside_reports(const std::filesystem::path& folder);

/// Removes NAME.old, as `file` is written. An error is ignored: no one reads that name for a
/// report.
void remove_old(const std::filesystem::path& file) noexcept;

/// The report.json that `input` is, or that is in the folder `input`.
/// Errors   FileError where the last run in that folder has left none, which names the earlier one.
[[nodiscard]] std::filesystem::path stored_report(const std::filesystem::path& input);

}  // namespace isoshard
