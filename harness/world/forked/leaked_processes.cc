// SPDX-License-Identifier: Apache-2.0
/// Children of this process as /proc lists them.
#include "harness/world/forked/leaked_processes.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "harness/world/forked/unique_fd.h"

namespace isoshard {
namespace {

constexpr std::chrono::seconds kLeakGrace{5};
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
bool end_leaked(pid_t pid) {
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  ::kill(pid, SIGKILL);
  pollfd end{process.get(), POLLIN, 0};
  (void)::poll(&end, 1, static_cast<int>(std::chrono::milliseconds(kLeakGrace).count()));
  return ::waitpid(pid, nullptr, WNOHANG) != 0;
}

// Zombies included. Empty at the cost of one system call if there are none.
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

bool wears(pid_t pid, DescentMark mark) noexcept {
  rlimit limit{};
  return ::prlimit(pid, RLIMIT_LOCKS, nullptr, &limit) == 0 && limit.rlim_cur == mark;
}

template <class Select>
LeakedProcesses end_children(Select is_leaked) {
  LeakedProcesses result;
  std::set<pid_t> still_there;
  for (int round = 0; round < kMaxRounds; ++round) {
    std::set<pid_t> leaked = children_of_process();
    std::erase_if(leaked, [&](pid_t pid) { return still_there.contains(pid) || !is_leaked(pid); });
    if (leaked.empty()) return result;
    for (const pid_t pid : leaked) {
      if (const std::string name = name_of_living(pid); !name.empty())
        result.words +=
            fmt::format("{}process {} ({})", result.words.empty() ? "" : ", ", pid, name);
      if (end_leaked(pid)) continue;
      result.words += fmt::format(", which is still there {} s after SIGKILL", kLeakGrace.count());
      result.all_gone = false;
      still_there.insert(pid);
    }
  }
  result.all_gone = false;
  return result;
}

}  // namespace

void adopt_orphans() noexcept {
  set_adopting_orphans(true);
}

bool is_adopting_orphans() noexcept {
  int adopts = 0;
  return ::prctl(PR_GET_CHILD_SUBREAPER, &adopts) == 0 && adopts != 0;
}

void set_adopting_orphans(bool adopts) noexcept {
  ::prctl(PR_SET_CHILD_SUBREAPER, adopts ? 1 : 0);
}

DescentMark new_descent_mark() noexcept {
  constexpr DescentMark kOurs = 0x15054a5d;  // no limit that anybody sets
  static std::atomic<std::uint32_t> count{0};
  const auto pid = static_cast<DescentMark>(::getpid()) & 0x3fffff;  // the kernel's largest
  return kOurs << 32 | pid << 10 | (count.fetch_add(1) & 0x3ff);
}

void wear_mark(DescentMark mark) noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_LOCKS, &limit) != 0) return;
  limit.rlim_cur = mark;
  (void)::setrlimit(RLIMIT_LOCKS, &limit);
}

LeakedProcesses end_all_children() {
  return end_children([](pid_t) { return true; });
}

LeakedProcesses end_marked_children(DescentMark mark, std::set<pid_t> known) {
  return end_children([&](pid_t pid) { return !known.contains(pid) && wears(pid, mark); });
}

}  // namespace isoshard
