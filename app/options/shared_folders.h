// SPDX-License-Identifier: Apache-2.0
/// Folders that ranks of several hosts write to together, as those of checkpoints are.
#pragma once
#include <filesystem>
#include <memory>
#include <string_view>
#include <vector>

#include "harness/cli/output_folder.h"
#include "harness/world/launcher.h"

namespace isoshard {

/// Each of the folders as an OutputFolder, for all processes that judge together.
///
/// Guarantees   made before any rank starts, it proves that every process sees one and the same
///              folder under that name, and can make a file in it. Process 0 holds the lock, so no
///              other run writes there as long as it lives.
/// Ranks        with Launcher::peers collective over them, with as many folders on all.
/// Errors       UsageError, on all processes the same: as OutputFolder; with rank, hosts and path
///              where a process does not see what process 0 has made in a folder, or cannot write
///              to it. Nothing is left then.
///
///     const SharedFolders folders(default_launcher(), {"disk/saved/ddp"}, "--save-checkpoint");
class SharedFolders {
 public:
  SharedFolders(Launcher& launcher, const std::vector<std::filesystem::path>& folders,
                std::string_view option);

 private:
  std::vector<std::unique_ptr<OutputFolder>> folders_;
};

}  // namespace isoshard
