// SPDX-License-Identifier: Apache-2.0
// Environment, arguments and folders.
#include "harness/golden/golden_mode.h"

#include <fmt/format.h>

#include <cstdlib>
#include <system_error>

#include "core/base/error.h"

namespace isoshard {
namespace {

constexpr std::string_view kFlag = "--golden", kVariable = "ISOSHARD_GOLDEN";

bool recording = false;  // of this process, set once at its start

bool is_record(std::string_view value, std::string_view where) {
  if (value == "record") return true;
  if (value == "check") return false;
  throw UsageError(fmt::format("{} must be check or record, got '{}'", where, value));
}

bool is_folder(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

std::filesystem::path folder_in(const char* variable) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

}  // namespace

bool is_ci() noexcept {
  const char* const value = std::getenv("CI");
  return value != nullptr && *value != '\0';
}

void refuse_in_ci(std::string_view what) {
  if (is_ci())
    throw GoldenError(
        fmt::format("{} is refused because CI is set in the environment; goldens change only by a "
                    "commit that a person makes",
                    what));
}

bool take_golden_mode(int& argc, char** argv) {
  const char* const variable = std::getenv(std::string(kVariable).c_str());
  recording = variable != nullptr && *variable != '\0' && is_record(variable, kVariable);
  int kept = 0;
  for (int i = 0; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (i > 0 && argument.starts_with(kFlag)) {
      const bool has_value = argument.size() > kFlag.size() && argument[kFlag.size()] == '=';
      recording = is_record(has_value ? argument.substr(kFlag.size() + 1) : "", kFlag);
      continue;
    }
    argv[kept++] = argv[i];
  }
  argc = kept;
  argv[argc] = nullptr;
  if (recording) refuse_in_ci("--golden=record");
  return recording;
}

bool is_recording_goldens() noexcept {
  return recording;
}

std::filesystem::path default_golden_folder() {
  const std::filesystem::path in_source_tree = ISOSHARD_GOLDEN_DIR;
  if (is_folder(in_source_tree.parent_path())) return in_source_tree;
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path().parent_path() /
         "share" / "isoshard" / "golden";
}

std::filesystem::path default_pending_folder() {
  const std::filesystem::path in_build_folder = ISOSHARD_PENDING_DIR;
  if (is_folder(in_build_folder.parent_path())) return in_build_folder;
  const std::filesystem::path state = folder_in("XDG_STATE_HOME");
  return (state.empty() ? folder_in("HOME") / ".local" / "state" : state) / "isoshard" /
         "golden-pending";
}

}  // namespace isoshard
