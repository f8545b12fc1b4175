// SPDX-License-Identifier: Apache-2.0
/// Test helper: one row is one bad input, given to the whole program in a child process.
#pragma once
#include <stdlib.h>
#include <sys/syscall.h>

#include <cerrno>
#include <filesystem>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "app/program.h"
#include "harness/testing/test_child.h"
#include "harness/testing/test_folder.h"

namespace isoshard::malformed {

using Arguments = std::vector<std::string>;

/// What the row's files are made by, in a fresh folder that is the program's working directory.
using Craft = std::function<void(const TestFolder& folder)>;

struct Row {
  std::string name;
  Craft craft;
  Arguments arguments;
  int exit_code = 0;
  std::vector<std::string> words;  ///< all must be in what is printed
};

inline void PrintTo(const Row& row, std::ostream* out) {
  *out << row.name;
}

inline std::string name_of_row(const std::string& name) {
  return name;
}

/// Path -> content (for what is no regular file: its kind) of everything below the folder.
inline std::map<std::string, std::string> tree_of(const std::filesystem::path& folder) {
  std::map<std::string, std::string> tree;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const auto status = entry.symlink_status();
    tree[entry.path().lexically_relative(folder).string()] =
        std::filesystem::is_regular_file(status) ? content_of(entry.path())
                                                 : std::to_string(static_cast<int>(status.type()));
  }
  return tree;
}

/// The flags of a small case that conforms, and `more`.
inline Arguments one_case(const Arguments& more = {}) {
  Arguments arguments = {"verify",     "--model", "tiny",    "--tp", "2",      "--dp",  "1",
                         "--subjects", "autotp",  "--dtype", "fp32", "--data", "random"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// Runs the program in `folder`; its lines are not broken, as on a wide terminal. `prepare` runs in
/// the child before it: limits, refusals.
inline ChildResult run_isoshard(const std::filesystem::path& folder, const Arguments& arguments,
                                const std::function<void()>& prepare = nullptr) {
  return run_in_child([&] {
    std::filesystem::current_path(folder);
    ::setenv("COLUMNS", "100000", 1);
    if (prepare) prepare();
    return run_program(arguments);
  });
}

/// The kernel refuses every new process: what starts a rank ends with 4.
inline void refuse_new_processes() {
  for (const long call : {SYS_clone, SYS_fork, SYS_vfork}) refuse_system_call(call, EPERM);
  refuse_system_call(SYS_clone3, ENOSYS);
}

/// The child may take so much more address space than it has now.
inline void limit_growth(std::size_t bytes) {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  set_limit(RLIMIT_AS, pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + bytes);
}

}  // namespace isoshard::malformed
