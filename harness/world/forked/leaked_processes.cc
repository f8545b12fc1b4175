// SPDX-License-Identifier: Apache-2.0
/// Children of this process as /proc lists them.
#include "harness/world/forked/leaked_processes.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "harness/world/forked/unique_fd.h"

namespace isoshard {
namespace {

constexpr std::chrono::seconds kKillGrace{5};
constexpr int kMaxRounds = 64;  // a process that forks faster than it is killed

bool has_children() noexcept {
  siginfo_t info{};
  return ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 || errno != ECHILD;
}

// "sleep" of "/proc/123/stat: 123 (sleep) S ..."; empty for a zombie or one that is gone.
std::string name_of_living(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  std::getline(file, line);
  const std::size_t begin = line.find('('), end = line.rfind(')');
  if (begin == std::string::npos || end == std::string::npos || end + 2 >= line.size() ||
      line[end + 2] == 'Z')
    return {};
  return line.substr(begin + 1, end - begin - 1);
}

// Kills and reaps a child. False if it does not go.
bool end_process(pid_t pid) {
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  ::kill(pid, SIGKILL);
  pollfd end{process.get(), POLLIN, 0};
  (void)::poll(&end, 1, static_cast<int>(std::chrono::milliseconds(kKillGrace).count()));
  return ::waitpid(pid, nullptr, WNOHANG) != 0;
}

}  // namespace

void adopt_orphans() noexcept {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

std::set<pid_t> children_of_process() {
  std::set<pid_t> children;
  if (!has_children()) return children;
  std::error_code none;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", none)) {
    std::ifstream file(task.path() / "children");
    for (pid_t pid = 0; file >> pid;) children.insert(pid);
  }
  return children;
}

std::string end_leaked_processes(std::set<pid_t> known) {
  std::string words;
  for (int round = 0; round < kMaxRounds; ++round) {
    std::set<pid_t> leaked = children_of_process();
    std::erase_if(leaked, [&](pid_t pid) { return known.contains(pid); });
    if (leaked.empty()) break;
    for (const pid_t pid : leaked) {
      if (const std::string name = name_of_living(pid); !name.empty())
        words += fmt::format("{}process {} ({})", words.empty() ? "" : ", ", pid, name);
      if (end_process(pid)) continue;
      words += fmt::format(", which is still there {} s after SIGKILL", kKillGrace.count());
      known.insert(pid);
    }
  }
  return words;
}

}  // namespace isoshard
