// SPDX-License-Identifier: Apache-2.0
/// The folder of accepted goldens and its manifest. Every golden that is read from it was accepted
/// and is unchanged since then.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "harness/golden/golden.h"

namespace isoshard {

/// The entry of one golden in manifest.json.
struct GoldenEntry {
  std::string file;      ///< in the folder
  std::string sha256;    ///< of its bytes
  std::string reason;    ///< why it was accepted
  std::string recorded;  ///< when it was recorded
  std::string accepted;  ///< when it was accepted, "2026-11-21T22:10:00Z"
};

/// The accepted goldens of a folder.
///
/// Errors   GoldenError for every problem of the folder, with the command that mends it: a missing
///          golden, a file that is missing, was edited, has a NaN or fewer lines than its count, a
///          malformed manifest.
class GoldenStore {
 public:
  /// A folder that is missing or empty has no goldens.   Errors   GoldenError if the manifest is
  /// malformed.
  explicit GoldenStore(std::filesystem::path folder);

  [[nodiscard]] const std::filesystem::path& folder() const noexcept { return folder_; }
  [[nodiscard]] const std::map<std::string, GoldenEntry>& entries() const noexcept {
    return entries_;
  }
  [[nodiscard]] Golden read(const std::string& name) const;
  /// Files that the manifest does not list, by name.
  [[nodiscard]] std::vector<std::string> unlisted_files() const;

  /// Accepts a pending golden: writes its file and then the manifest, each atomically.
  ///
  /// Errors   GoldenError that refuses: an empty reason; NaN or an infinity; a failed parity check;
  ///          a build that is dirty, unknown or has sanitizers; where CI is set.
  void accept(const Golden& pending, const std::string& reason, const std::string& now);
  /// Removes a golden from the manifest, and its file.   Errors   GoldenError: not listed; an empty
  /// reason; where CI is set.
  void remove(const std::string& name, const std::string& reason);

 private:
  void write_manifest() const;

  std::filesystem::path folder_;
  std::map<std::string, GoldenEntry> entries_;
};

/// The command that creates a golden, or creates it again.
[[nodiscard]] std::string command_to_create(std::string_view name);

/// Every pending golden of a folder, by name; none if the folder is missing.   Errors   as
/// parse_golden.
[[nodiscard]] std::map<std::string, Golden> read_pending(const std::filesystem::path& folder);
/// Errors   GoldenError where CI is set; as write_file_atomically.
void write_pending(const std::filesystem::path& folder, const Golden& golden);

/// UTC, to the second: "2026-11-21T22:05:00Z".
[[nodiscard]] std::string time_now();

}  // namespace isoshard
