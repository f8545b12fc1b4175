// SPDX-License-Identifier: Apache-2.0
/// Temporary files and folders that carry their maker's name, so that those of killed processes can
/// be removed by a later run.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>

namespace isoshard {

/// "PID.START" of this process: its number, and when it was started, because numbers come again.
[[nodiscard]] std::string maker_mark();

/// Whether `mark` is that of a process that has ended. False for a text that is no mark, and in
/// doubt.
[[nodiscard]] bool is_maker_gone(std::string_view mark);

/// Marks an open file or folder as in use until it is closed here and in all forked processes, also
/// for machines and containers that do not see this process. Best effort: not every file system
/// can.
void hold(int fd) noexcept;
/// Whether nobody holds it. It is held by this descriptor then.
[[nodiscard]] bool take_over(int fd) noexcept;

/// Removes what killed runs of this user have left in `folder`: files named *.tmp.MARK.N.
/// Ranks    one process; other processes may do the same.
void sweep_temporary_files(int folder_fd, std::string_view first_part = {}) noexcept;

/// The same for folders named FIRST-MARK-*, with what is in them.
void sweep_folders(const std::filesystem::path& folder, std::string_view first) noexcept;

}  // namespace isoshard
