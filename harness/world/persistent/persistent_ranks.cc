// SPDX-License-Identifier: Apache-2.0
/// Forks, variables, and waits.
#include "harness/world/persistent/persistent_ranks.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/comm/collective.h"
#include "harness/world/end_process.h"
#include "harness/world/forked/crash_handler.h"
#include "harness/world/forked/unique_fd.h"

namespace isoshard {
namespace {

/// The exit code of a run that could not be judged (harness/verdict/exit_code.h).
constexpr int kBroken = 4;

constexpr const char* kOfOtherLaunchers[] = {"OMPI_COMM_WORLD_RANK",
                                             "OMPI_COMM_WORLD_SIZE",
                                             "PMI_RANK",
                                             "PMI_SIZE",
                                             "SLURM_PROCID",
                                             "SLURM_NTASKS",
                                             "PMIX_RANK",
                                             "PMIX_NAMESPACE",
                                             "TORCHELASTIC_RUN_ID",
                                             "TORCHELASTIC_USE_AGENT_STORE",
                                             "ISOSHARD_MASTER_PORT"};

/// A socket of this host alone that listens at a free port. Rank 0 has it from its start on, so
/// that nobody else can take the port.
class Meeting {
 public:
  Meeting() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    if (socket_ < 0 || ::bind(socket_, any, length) != 0 || ::listen(socket_, kMaxRanks) != 0 ||
        ::getsockname(socket_, any, &length) != 0)
      throw InfrastructureError(
          fmt::format("cannot get a port for ranks to meet at: {}", std::strerror(errno)));
    port_ = ntohs(address.sin_port);
  }
  ~Meeting() { ::close(socket_); }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  [[nodiscard]] int socket() const noexcept { return socket_; }
  [[nodiscard]] int port() const noexcept { return port_; }

 private:
  int socket_;
  int port_ = 0;
};

void set_variables(int rank, int num_ranks, const Meeting& meeting) {
  const auto set = [](const char* name, const std::string& value) {
    ::setenv(name, value.c_str(), /*overwrite=*/1);
  };
  for (const char* const name : kOfOtherLaunchers) ::unsetenv(name);
  set("RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(num_ranks));
  set("LOCAL_RANK", std::to_string(rank));
  set("LOCAL_WORLD_SIZE", std::to_string(num_ranks));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(meeting.port()));
  ::unsetenv("ISOSHARD_MASTER_SOCKET");
  if (rank == 0) set("ISOSHARD_MASTER_SOCKET", std::to_string(meeting.socket()));
}

/// Of the processes that signals go on to; read in a handler.
std::array<volatile pid_t, kMaxRanks> running{};

void hand_on(int signal) {
  for (const volatile pid_t& pid : running) {
    if (pid > 0) ::kill(pid, signal);
  }
}

/// Whether all ranks are there, and a signal that came before.
volatile std::sig_atomic_t are_all_there = 0, came_early = 0;

// Those of a terminal come to the ranks as well: they are of its group of processes.
void on_signal(int signal, siginfo_t* info, void* /*context*/) {
  if (are_all_there == 0) came_early = signal;
  if (info->si_code != SI_KERNEL) hand_on(signal);
}

/// What the rank's process ends with. An exception is told, and counts as 4, which says nothing of
/// what was judged.
int code_of(const std::function<int()>& body) noexcept {
  try {
    return body();
  } catch (...) {
    std::fprintf(stderr, "%s\n", current_exception_in_words().c_str());
    return kBroken;
  }
}

/// Signals go to the ranks while it lives, but those that the caller ignores, as under nohup. What
/// comes before release() goes to ranks that start later, too, and no rank loses one while it still
/// has the caller's handlers. The ends of ranks can be waited for, whatever whoever started this
/// process does with those of its own.
class SignalsForRanks {
 public:
  SignalsForRanks() {
    are_all_there = 0;
    came_early = 0;
    sigset_t blocked;
    ::sigemptyset(&blocked);
    for (const int signal : kSignals) ::sigaddset(&blocked, signal);
    ::pthread_sigmask(SIG_BLOCK, &blocked, &mask_before_);
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_RESTART | SA_SIGINFO;
    ::sigemptyset(&action.sa_mask);
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], nullptr, &before_[i]);
      if (before_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
    }
    struct sigaction usual {};
    usual.sa_handler = SIG_DFL;
    ::sigemptyset(&usual.sa_mask);
    ::sigaction(SIGCHLD, &usual, &of_children_);
  }
  ~SignalsForRanks() {
    put_back();
    ::sigaction(SIGCHLD, &of_children_, nullptr);
  }
  SignalsForRanks(const SignalsForRanks&) = delete;
  SignalsForRanks& operator=(const SignalsForRanks&) = delete;
  /// All ranks are there, and get what came meanwhile: a terminal's signal has reached only those
  /// that it found.
  void release() const {
    are_all_there = 1;
    sigset_t pending;
    ::sigpending(&pending);
    for (const int signal : kSignals) {
      if (signal == came_early || ::sigismember(&pending, signal) == 1) hand_on(signal);
    }
    ::pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
  }
  /// For a child, which has its own way with them.
  void put_back() const {
    for (std::size_t i = 0; i < kSignals.size(); ++i)
      ::sigaction(kSignals[i], &before_[i], nullptr);
    ::pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
  }

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_{};
  struct sigaction of_children_ {};
  sigset_t mask_before_{};
};

/// Whether the process has ended, and how. Does not wait.
std::optional<PersistentRank> end_of(pid_t pid) {
  int status = 0;
  const pid_t ended = ::waitpid(pid, &status, WNOHANG);
  if (ended == 0 || (ended < 0 && errno == EINTR)) return std::nullopt;
  if (ended < 0) return PersistentRank{.code = kBroken};
  if (WIFSIGNALED(status)) return PersistentRank{.signal = WTERMSIG(status)};
  return PersistentRank{.code = WEXITSTATUS(status)};
}

/// Whether the others may never come to an end of their own. Codes 0, 1 and 5 are verdicts, which
/// all ranks have come to.
bool is_broken(const PersistentRank& rank) {
  return rank.signal != 0 || (rank.code != 0 && rank.code != 1 && rank.code != 5);
}

/// Ends those that outlive one that broke.
class Grace {
 public:
  explicit Grace(std::chrono::milliseconds grace) : grace_(grace) {}
  void begin() {
    if (next_ == kNever) next_ = Clock::now() + grace_;
  }
  /// How long nothing is to be done: until then, in milliseconds; -1: for ever.
  [[nodiscard]] int rest_ms() const {
    if (next_ == kNever) return -1;
    const auto rest = std::chrono::ceil<std::chrono::milliseconds>(next_ - Clock::now());
    return static_cast<int>(std::max<std::int64_t>(rest.count(), 0));
  }
  void look() {
    if (Clock::now() < next_) return;
    is_telling_ = true;
    hand_on(std::exchange(signal_, SIGKILL));
    next_ += grace_;
  }
  [[nodiscard]] bool is_telling() const noexcept { return is_telling_; }

 private:
  using Clock = std::chrono::steady_clock;
  std::chrono::milliseconds grace_;
  static constexpr Clock::time_point kNever = Clock::time_point::max();
  Clock::time_point next_ = kNever;
  int signal_ = SIGTERM;
  bool is_telling_ = false;
};

/// `processes`: a descriptor of each rank's process, readable when it has ended.
std::vector<PersistentRank> ends_of_all(std::span<const UniqueFd> processes,
                                        std::chrono::milliseconds grace) {
  std::vector<PersistentRank> result(processes.size());
  std::vector<pollfd> waited;
  for (const UniqueFd& process : processes) waited.push_back({process.get(), POLLIN, 0});
  Grace watched(grace);
  for (std::size_t num_ended = 0; num_ended < result.size();) {
    // A signal of this process ends the wait early, which does no harm.
    (void)::poll(waited.data(), waited.size(), watched.rest_ms());
    for (std::size_t rank = 0; rank < result.size(); ++rank) {
      const pid_t pid = running[rank];
      const std::optional<PersistentRank> end = pid == 0 ? std::nullopt : end_of(pid);
      if (!end) continue;
      running[rank] = 0;
      waited[rank].fd = -1;  // which poll leaves out
      result[rank] = *end;
      result[rank].was_told = watched.is_telling();
      ++num_ended;
      if (is_broken(*end)) watched.begin();
    }
    watched.look();
  }
  return result;
}

}  // namespace

std::vector<PersistentRank> run_persistent_ranks(int num_ranks, const std::function<int()>& body,
                                                 std::chrono::milliseconds grace) {
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw UsageError(fmt::format("the number of persistent ranks must be from 1 to {}, got {}",
                                 kMaxRanks, num_ranks));
  }
  std::optional<Meeting> meeting(std::in_place);
  const SignalsForRanks signals;
  const pid_t controller = ::getpid();
  std::fflush(nullptr);
  int refusal = 0;
  std::vector<UniqueFd> processes;
  for (int rank = 0; rank < num_ranks && refusal == 0; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      for (volatile pid_t& other : running) other = 0;
      signals.put_back();
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != controller) ::_exit(kBroken);
      set_variables(rank, num_ranks, *meeting);
      if (rank != 0) ::close(meeting->socket());
      end_process(code_of(body));
    }
    if (pid < 0) {
      refusal = errno;
      continue;
    }
    running[static_cast<std::size_t>(rank)] = pid;
    processes.emplace_back(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    if (!processes.back().is_open()) refusal = errno;
  }
  // Where rank 0 ends early, whoever wants to meet it is refused.
  meeting.reset();
  signals.release();
  if (refusal != 0) hand_on(SIGKILL);
  std::vector<PersistentRank> result = ends_of_all(processes, grace);
  if (refusal != 0) {
    throw InfrastructureError(fmt::format("cannot start {} processes for persistent ranks: {}",
                                          num_ranks, std::strerror(refusal)));
  }
  return result;
}

}  // namespace isoshard
