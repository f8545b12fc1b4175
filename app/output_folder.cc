// SPDX-License-Identifier: Apache-2.0
/// Makes output folders and finds out early whether they can be written to.
#include "app/output_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/atomic_file.h"
#include "base/error.h"

namespace isoshard {

void require_writable_folder(const std::filesystem::path& folder, std::string_view option) {
  std::error_code error;
  const auto status = std::filesystem::symlink_status(folder, error);
  if (std::filesystem::is_symlink(status))
    throw UsageError(fmt::format("{} {}: is a symbolic link; name the folder itself", option, folder.string()));
  if (std::filesystem::exists(status) && !std::filesystem::is_directory(status))
    throw UsageError(fmt::format("{} {}: exists and is not a folder", option, folder.string()));
  std::filesystem::create_directories(folder, error);
  if (error) throw UsageError(fmt::format("{} {}: cannot be made: {}", option, folder.string(), error.message()));
  // access() would lie to root on a read-only file system, so try for real.
  const int probe = open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
  if (probe >= 0) {
    close(probe);
  } else if (errno == EOPNOTSUPP || errno == EISDIR) {
    if (access(folder.c_str(), W_OK) != 0)
      throw UsageError(fmt::format("{} {}: not writable: {}", option, folder.string(), std::strerror(errno)));
  } else {
    throw UsageError(fmt::format("{} {}: not writable: {}", option, folder.string(), std::strerror(errno)));
  }
}

void write_reports(const std::filesystem::path& folder, int exit_code, const nlohmann::json& cases, const nlohmann::json& tables,
                   std::string_view text) {
  if (folder.empty()) return;
  const nlohmann::json report = {{"schema", 1}, {"exit_code", exit_code}, {"cases", cases}, {"tables", tables}};
  write_file_atomically(folder / "report.json", report.dump(1) + "\n");
  write_file_atomically(folder / "report.txt", text);
}

}  // namespace isoshard
