// SPDX-License-Identifier: Apache-2.0
/// Folders that commands write to.
#pragma once
#include <sys/types.h>

#include <filesystem>
#include <memory>
#include <string_view>

#include "core/system/folder.h"

namespace isoshard {

/// A folder that this process writes to, and no other one at the same time.
///
/// Guarantees   the constructor makes the folder if needed, proves that a file can be made in it
///              and takes its lock (`.isoshard.lock`, which holds the process number), all before
///              any rank starts. The destructor removes the lock, and the folder if it was made
///              here and nothing was written to it. A process that was killed holds no lock,
///              whatever is left.
///              From then on files of this process below that path are made in the folder that was
///              locked, even if it, or a folder above it, is replaced by a link. Temporary files
///              that killed runs have left in it are removed.
/// Errors       UsageError that names option, folder and why: it is a file or a link, cannot be
///              made or written to, has a directory, FIFO, device or socket in the place of a
///              report, or is in use, with the number of the process that uses it.
///
///     const OutputFolder folder(options.output_dir, "--output-dir"); // an empty path is no
///       folder, and no error
class OutputFolder {
 public:
  OutputFolder(std::filesystem::path folder, std::string_view option);
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;
  ~OutputFolder();

 private:
  void open_and_lock(std::string_view option);
  void let_go() noexcept;
  void require_regular_files(std::string_view option) const;
  void lock(std::string_view option);

  std::filesystem::path folder_;
  pid_t owner_;
  bool made_ = false;
  int descriptor_ = -1;  ///< of the folder
  std::unique_ptr<AnchoredFolder> anchor_;
  int fd_ = -1;  ///< of the lock; -1 if this process has it through another object
};

/// Proves that a file can be made in `folder`, which `descriptor` has open.
/// Errors   UsageError that names option, folder and why not.
void require_writable(const std::filesystem::path& folder, int descriptor, std::string_view option);

/// For a file that an option names.
/// Errors   UsageError that names option and file if a directory, FIFO, device or socket is there.
void require_output_file(const std::filesystem::path& path, std::string_view option);

}  // namespace isoshard
