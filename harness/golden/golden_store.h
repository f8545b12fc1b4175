// SPDX-License-Identifier: Apache-2.0
/// The folder of accepted goldens and its manifest: what is read from it was accepted, and is as it
/// was accepted.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "harness/golden/golden.h"

namespace isoshard {

/// What manifest.json says of one golden.
struct GoldenEntry {
  std::string file;      ///< in the folder
  std::string sha256;    ///< of its bytes
  std::string reason;    ///< why it was accepted
  std::string recorded;  ///< when it was recorded
  std::string accepted;  ///< when it was accepted, "2026-11-21T22:10:00Z"
};

/// The accepted goldens of a folder.
///
/// Errors   GoldenError for whatever is wrong in the folder, with the command that mends it: a
///          golden that is missing, a file that is gone, was edited, has NaN in it or fewer lines
///          than its count, a manifest that is none.
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

  /// Takes a pending golden: its file, then the manifest, each at once or not at all.
  ///
  /// Errors   GoldenError that refuses: an empty reason; NaN or an infinity; a failed parity check;
  ///          a build that is dirty, unknown or has sanitizers; where CI is set.
  void accept(const Golden& pending, const std::string& reason, const std::string& now);
  /// Takes a golden off the list, with its file.   Errors   GoldenError: not listed; an empty
  /// reason; where CI is set.
  void remove(const std::string& name, const std::string& reason);

 private:
  void write_manifest() const;

  std::filesystem::path folder_;
  std::map<std::string, GoldenEntry> entries_;
};

/// The command that makes a golden, or makes it anew.
[[nodiscard]] std::string command_to_create(std::string_view name);

/// Every pending golden of a folder, by name; none if the folder is missing.   Errors   as
/// parse_golden.
[[nodiscard]] std::map<std::string, Golden> read_pending(const std::filesystem::path& folder);
/// Errors   GoldenError where CI is set; as write_file_atomically.
void write_pending(const std::filesystem::path& folder, const Golden& golden);

/// UTC, to the second: "2026-11-21T22:05:00Z".
[[nodiscard]] std::string time_now();

}  // namespace isoshard
