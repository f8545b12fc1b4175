// SPDX-License-Identifier: Apache-2.0
/// Test helper: runs a function in a child process, under limits and refusals that the kernel
/// itself applies.
#pragma once
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>

namespace isoshard {

struct ChildResult {
  int exit_code = -1;  ///< -1: it was killed
  int signal = 0;      ///< that killed it
  std::string output;
  std::string error;
  bool left_processes = false;  ///< a process that it started was still there when it had ended
};

namespace detail {

inline std::string take_content(int fd) {
  std::string text(static_cast<std::size_t>(::lseek(fd, 0, SEEK_END)), '\0');
  const ssize_t count = ::pread(fd, text.data(), text.size(), 0);
  text.resize(count < 0 ? 0 : static_cast<std::size_t>(count));
  ::close(fd);
  return text;
}

}  // namespace detail

/// Waits for every process that this one has inherited (see become_subreaper). True if there was
/// any.
inline bool reap_orphans() {
  bool any = false;
  while (::waitpid(-1, nullptr, 0) > 0 || errno == EINTR) any = true;
  return any;
}

/// Orphaned grandchildren become children of this process, so that none can be left unseen.
inline void become_subreaper() {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

/// Runs `body` in a forked child and ends the child with the code it returns (an exception: 99 and
/// its text on stderr). A child that takes longer than `limit_s` is killed by SIGALRM.
inline ChildResult run_in_child(const std::function<int()>& body, unsigned limit_s = 500) {
  become_subreaper();
  const int output = ::memfd_create("stdout", 0), error = ::memfd_create("stderr", 0);
  if (output < 0 || error < 0) throw std::runtime_error("no memfd");
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error("no child");
  if (pid == 0) {
    ::prctl(PR_SET_CHILD_SUBREAPER, 0);
    ::alarm(limit_s);
    ::dup2(output, STDOUT_FILENO);
    ::dup2(error, STDERR_FILENO);
    int code = 99;
    try {
      code = body();
    } catch (const std::exception& exception) {
      std::fprintf(stderr, "in the child: %s\n", exception.what());
    }
    std::fflush(nullptr);
    ::_exit(code);
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  ChildResult result;
  result.left_processes = reap_orphans();
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  result.output = detail::take_content(output);
  result.error = detail::take_content(error);
  return result;
}

// ---- for the body: each holds for the rest of the process
// --------------------------------------------------------------------

inline void set_limit(int resource, rlim_t value) {
  const rlimit limit{value, value};
  if (::setrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0)
    throw std::runtime_error("setrlimit is refused");
}

/// Every call of `system_call` is answered with `error` and does nothing; 0 pretends that it
/// succeeded. No privilege is needed.
inline void refuse_system_call(long system_call, int error) {
  std::array<sock_filter, 4> program{
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(system_call), 0,
                           1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (static_cast<std::uint32_t>(error) &
                                                                 SECCOMP_RET_DATA)),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
    throw std::runtime_error("cannot install a filter of system calls");
  }
}

/// Root may write everywhere and start any number of processes: a test of such limits is no root,
/// and no user with other processes.
inline void give_up_root() {
  constexpr uid_t kUnusedUser = 54'321;
  if (::geteuid() == 0 && (::setresgid(kUnusedUser, kUnusedUser, kUnusedUser) != 0 ||
                           ::setresuid(kUnusedUser, kUnusedUser, kUnusedUser) != 0))
    throw std::runtime_error("cannot give up root");
}

}  // namespace isoshard
