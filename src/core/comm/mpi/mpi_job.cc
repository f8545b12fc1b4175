// SPDX-License-Identifier: Apache-2.0
/// MPI_Init_thread, and what happens at exit.
#include "core/comm/mpi/mpi_job.h"

#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "core/base/error.h"
#include "core/base/quiet_thread.h"
#include "core/comm/mpi/launcher.h"

namespace isoshard {
namespace {

constexpr int kExitCode = 4;
std::atomic<bool> ends_in_abort = false;

// MPI ends a process whose mpirun was killed only once the two have found each other. Not
// PR_SET_PDEATHSIG: it follows the thread that forked this process, and mpirun ends that early.
void end_with_launcher() {
  static constexpr std::chrono::seconds kForMpi{2};  // which says more, if it notices
  const int launcher = static_cast<int>(::syscall(SYS_pidfd_open, ::getppid(), 0));
  if (launcher < 0) return;
  quiet_thread([launcher] {
    pollfd ended{launcher, POLLIN, 0};
    while (::poll(&ended, 1, -1) < 0 && errno == EINTR) {
    }
    std::this_thread::sleep_for(kForMpi);
    constexpr std::string_view kLine = "isoshard: the process that started this rank has ended\n";
    (void)!::write(STDERR_FILENO, kLine.data(), kLine.size());
    ::_Exit(kExitCode);
  }).detach();
}

}  // namespace

void finish_mpi() noexcept {
  int is_ended = 0;
  if (MPI_Finalized(&is_ended) != MPI_SUCCESS || is_ended != 0) return;
  if (ends_in_abort) {
    MPI_Abort(MPI_COMM_WORLD, kExitCode);
  } else {
    MPI_Finalize();
  }
}

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw InfrastructureError(
      fmt::format("{} failed: {}; look for the message of mpirun", call,
                  std::string_view(text.data(), static_cast<std::size_t>(length))));
}

void start_mpi() {
  int is_running = 0;
  check_mpi(MPI_Initialized(&is_running), "MPI_Initialized");
  if (is_running != 0) return;
  check_launcher([](const char* name) { return std::getenv(name); });
  end_with_launcher();
  int provided = 0;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  std::atexit(finish_mpi);
  if (provided < MPI_THREAD_SERIALIZED) {
    throw InfrastructureError(
        "MPI must allow calls from any one thread at a time (MPI_THREAD_SERIALIZED), and this one "
        "does not; use an MPI that was built with threads");
  }
}

void end_in_abort() noexcept {
  ends_in_abort = true;
}

void end_job_now() noexcept {
  MPI_Abort(MPI_COMM_WORLD, kExitCode);
  ::_Exit(kExitCode);
}

void pause_between_polls() noexcept {
  using std::chrono::steady_clock;
  constexpr std::chrono::microseconds kSleep{20};
  constexpr std::chrono::milliseconds kLost{1}, kPause{200};
  static thread_local steady_clock::time_point sleeps_until{};
  const auto before = steady_clock::now();
  if (before < sleeps_until) {
    std::this_thread::sleep_for(kSleep);
    return;
  }
  sched_yield();
  const auto after = steady_clock::now();
  if (after - before > kLost) sleeps_until = after + kPause;
}

void await(MPI_Request& request) {
  using std::chrono::steady_clock;
  constexpr std::chrono::minutes kLongest{5};
  const auto start = steady_clock::now();
  for (int is_done = 0;;) {
    check_mpi(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
    if (is_done != 0) return;
    if (steady_clock::now() - start > kLongest) {
      std::fprintf(stderr,
                   "isoshard: all processes of MPI must come together within %lld minutes, and one "
                   "has not: it is stopped or hangs\n",
                   static_cast<long long>(kLongest.count()));
      end_job_now();
    }
    pause_between_polls();
  }
}

}  // namespace isoshard
