// SPDX-License-Identifier: Apache-2.0
/// Folders that commands write to.
#pragma once
#include <sys/types.h>

#include <filesystem>
#include <string_view>

namespace isoshard {

/// A folder that this process writes to, and no other one at the same time.
///
/// Guarantees   the constructor makes the folder if needed, proves that a file can be made in it
///              and takes its lock (`.isoshard.lock`, which holds the process number), all before
///              any rank starts. The destructor removes the lock, and the folder if it was made
///              here and nothing was written to it. A process that was killed holds no lock,
///              whatever is left.
/// Errors       UsageError that names option, folder and why: it is a file or a link, cannot be
///              made or written to, or is in use, with the number of the process that uses it.
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
  void require_writable(std::string_view option) const;
  void lock(std::string_view option);

  std::filesystem::path folder_;
  pid_t owner_;
  bool made_ = false;
  int fd_ = -1;  ///< of the lock; -1 if this process has it through another object
};

}  // namespace isoshard
