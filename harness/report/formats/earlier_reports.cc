// SPDX-License-Identifier: Apache-2.0
/// renameat in the folder that is locked.
#include "harness/report/formats/earlier_reports.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <string>
#include <system_error>

#include "core/base/error.h"
#include "core/system/folder.h"
#include "harness/report/formats/report_formats.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;

std::string old_name(const fs::path& file) {
  return file.filename().string() + ".old";
}

Folder folder_of(const fs::path& file) {
  return Folder::open(file.has_parent_path() ? file.parent_path() : fs::path("."));
}

}  // namespace

void set_aside(const fs::path& file) {
  try {
    const Folder folder = folder_of(file);
    const std::string name = file.filename().string(), old = old_name(file);
    if (::renameat(folder.fd(), name.c_str(), folder.fd(), old.c_str()) == 0 || errno == ENOENT)
      return;
    throw std::system_error(errno, std::generic_category());
  } catch (const std::system_error& error) {
    throw UsageError(
        fmt::format("{}: the report of an earlier run cannot be renamed to {}: {}; "
                    "remove it, or name another folder",
                    file.string(), old_name(file), error.code().message()));
  }
}

void set_aside_reports(const fs::path& folder) {
  if (folder.empty()) return;
  for (const ReportFormat& format : report_formats()) {
    if (format.is_usual) set_aside(folder / format.file_name);
  }
}

void remove_old(const fs::path& file) noexcept {
  try {
    folder_of(file).remove_file(old_name(file));
  } catch (const std::exception&) {  // as promised
  }
}

fs::path stored_report(const fs::path& input) {
  std::error_code ignored;
  if (!fs::is_directory(input, ignored)) return input;
  fs::path file = input / "report.json";
  const fs::path old = input / old_name(file);
  if (!fs::exists(file, ignored) && fs::exists(old, ignored)) {
    throw FileError(fmt::format(
        "{}: the last run in this folder ended without a report, as one that is killed does; {} is "
        "that of the run before it",
        file.string(), old.string()));
  }
  return file;
}

}  // namespace isoshard
