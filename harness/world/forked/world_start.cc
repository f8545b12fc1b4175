// SPDX-License-Identifier: Apache-2.0
/// Starting ranks, and the loop over all running worlds.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "core/base/error.h"
#include "core/comm/collective.h"
#include "core/comm/region/region.h"
#include "core/comm/shm/shm_world.h"
#include "core/system/standard_descriptors.h"
#include "harness/world/forked/crash_handler.h"
#include "harness/world/forked/leaked_processes.h"
#include "harness/world/forked/rank_main.h"
#include "harness/world/forked/world_state.h"
#include "harness/world/host_pause.h"
#include "harness/world/interrupt.h"

namespace isoshard {
namespace {

std::vector<WorldState*>& running_worlds() {
  static std::vector<WorldState*> worlds;
  return worlds;
}

// Of this process, before the first of the running worlds.
bool& was_adopting_orphans() {
  static bool was = false;
  return was;
}

std::uint64_t next_world_number() {
  static std::uint64_t next = 0;
  return next++;
}

std::string limit_in_words(int resource, std::string_view name) {
  rlimit limit{};
  ::getrlimit(static_cast<__rlimit_resource>(resource), &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return fmt::format("{} is unlimited", name);
  return fmt::format("{} is {}", name, limit.rlim_cur);
}

// What to look at when the kernel refuses with `error`.
[[noreturn]] void throw_refused(std::string_view what, int rank, int error) {
  std::string hint;
  if (error == EMFILE) {
    hint = limit_in_words(RLIMIT_NOFILE, "; RLIMIT_NOFILE (ulimit -n)");
  } else if (error == ENFILE) {
    hint = "; the system's file table is full (fs.file-max)";
  } else if (error == EAGAIN) {
    hint = limit_in_words(RLIMIT_NPROC, "; RLIMIT_NPROC (ulimit -u)") +
           "; a cgroup's pids.max may be lower";
  } else if (error == ENOMEM) {
    hint = limit_in_words(RLIMIT_AS, "; memory is short: RLIMIT_AS (ulimit -v)") +
           "; a cgroup's memory.max may be lower";
  }
  throw InfrastructureError(
      fmt::format("cannot {} for rank {}: {}{}", what, rank, std::strerror(error), hint));
}

struct Ends {
  UniqueFd own;  ///< the controller's, non-blocking
  UniqueFd rank;
};

Ends make_pipe(int rank) {
  std::array<int, 2> fds{};
  if (::pipe2(fds.data(), O_CLOEXEC) != 0) throw_refused("make a pipe", rank, errno);
  ::fcntl(fds[0], F_SETFL, O_NONBLOCK);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

Ends make_channel(int rank) {
  std::array<int, 2> fds{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()) != 0)
    throw_refused("make a result channel", rank, errno);
  ::fcntl(fds[0], F_SETFL, O_NONBLOCK);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

int checked_size(int size) {
  if (size < 1 || size > kMaxRegionRanks) {
    throw UsageError(
        fmt::format("the number of forked ranks must be from 1 to {}, got {}; start more with "
                    "mpirun -n {} and --attach",
                    kMaxRegionRanks, size, size));
  }
  return size;
}

std::unique_ptr<CommWorld> make_comm_world(const WorldOptions& options) {
  const Transport transport = options.transport.make ? options.transport : shm_transport();
  if (!transport.crosses_processes) {
    throw UsageError(
        fmt::format("the transport of forked ranks must cross processes, got {}; take shm",
                    name_of(transport.backend)));
  }
  return transport.make(checked_size(options.size), options.order);
}

// A fork copies only the calling thread: locks of others would stay locked, and an OpenMP pool
// hangs.
int num_threads() {
  struct stat tasks {};
  return ::stat("/proc/self/task", &tasks) == 0 ? static_cast<int>(tasks.st_nlink) - 2 : 1;
}

int allowed_threads = 1;

void require_single_thread() {
#if !defined(__SANITIZE_THREAD__)  // which has a thread of its own
  if (num_threads() > allowed_threads) {
    throw UsageError(
        fmt::format("a world must be forked from a process with one thread, got {} threads; join "
                    "them first, and call "
                    "at::set_num_threads(1) before the first tensor operation",
                    num_threads()));
  }
#endif
}

// Until a descriptor is ready, `until` has come or a signal has.
void wait_for(std::vector<pollfd>& polls, Clock::time_point until) {
  const auto left = std::max(until - Clock::now(), Clock::duration::zero());
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
  const timespec timeout{seconds.count(), std::chrono::nanoseconds(left - seconds).count()};
  if (::ppoll(polls.data(), polls.size(), until == Clock::time_point::max() ? nullptr : &timeout,
              nullptr) >= 0)
    return;
  for (pollfd& poll : polls) poll.revents = 0;  // EINTR
}

}  // namespace

void allow_threads_of_now() noexcept {
  allowed_threads = num_threads();
}

SlotMemory::SlotMemory(int num_ranks)
    : bytes_(sizeof(RankSlot) * static_cast<std::size_t>(num_ranks)) {
  void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw_refused("map shared memory", 0, errno);
  slots_ = static_cast<RankSlot*>(memory);
}

SlotMemory::~SlotMemory() {
  ::munmap(slots_, bytes_);
}

WorldState::WorldState(WorldOptions options, ForkedWorld::Body body)
    : options_(std::move(options)),
      body_(std::move(body)),
      number_(next_world_number()),
      owner_(::getpid()),
      comm_((occupy_standard_descriptors(), make_comm_world(options_))),
      slots_(options_.size),
      processes_(static_cast<std::size_t>(options_.size)) {
  call_world_hooks(options_.size);
  require_single_thread();
  prepare_backtraces();
  if (running_worlds().empty()) was_adopting_orphans() = is_adopting_orphans();
  adopt_orphans();
  last_look_ = Clock::now();
  running_worlds().push_back(this);
  try {
    for (int rank = 0; rank < options_.size; ++rank) start_rank(rank);
  } catch (...) {
    for (RankProcess& process : processes_) process.is_gone = process.pid < 0;
    stop("a rank could not be started");
    serve_until_done(*this);
    leave();
    throw;
  }
}

WorldState::~WorldState() {
  if (!is_owner()) return;  // a copy in a rank that called exit()
  if (!is_done()) {
    stop("the world was given up");
    serve_until_done(*this);
  }
  leave();
}

void WorldState::leave() noexcept {
  std::erase(running_worlds(), this);
  if (running_worlds().empty()) set_adopting_orphans(was_adopting_orphans());
}

bool WorldState::is_owner() const noexcept {
  return owner_ == ::getpid();
}

std::vector<int> WorldState::descriptors() const {
  std::vector<int> result;
  for (const RankProcess& process : processes_) {
    for (const UniqueFd* fd : {&process.pidfd, &process.channel, &process.standard_output,
                               &process.standard_error, &process.tether}) {
      if (fd->is_open()) result.push_back(fd->get());
    }
  }
  return result;
}

void WorldState::start_rank(int rank) {
  RankProcess& started = process(rank);
  started.report.rank = rank;
  started.parser = std::make_unique<FrameParser>(
      [this, &started](FrameType type, std::span<const std::byte> payload) {
        on_frame(started, type, payload);
      });
  Ends channel = make_channel(rank);
  Ends output = make_pipe(rank);
  Ends error = make_pipe(rank);
  Ends tether = make_pipe(rank);  // the other way round: the rank reads
  RankStart start{
      .rank = rank,
      .world_number = number_,
      .controller = owner_,
      .channel = channel.rank.get(),
      .tether = tether.own.get(),
      .mark = mark_,
      .standard_output = output.rank.get(),
      .standard_error = error.rank.get(),
      .to_close = {channel.own.get(), output.own.get(), error.own.get(), tether.rank.get()},
      .slot = &slots_[rank],
      .world = comm_.get(),
      .options = &options_,
      .body = &body_};
  for (const WorldState* world : running_worlds()) {
    for (const int fd : world->descriptors()) start.to_close.push_back(fd);
  }
  std::fflush(nullptr);  // else a rank would write the controller's buffered output once more
  const pid_t pid = ::fork();
  if (pid < 0) throw_refused("start a process", rank, errno);
  if (pid == 0) {
    running_worlds().clear();
    rank_main(start);
  }
  started.pid = pid;
  started.channel = std::move(channel.own);
  started.standard_output = std::move(output.own);
  started.standard_error = std::move(error.own);
  started.tether = std::move(tether.rank);
  started.pidfd.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!started.pidfd.is_open()) {
    const int refusal = errno;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    started.pid = -1;
    throw_refused("open a process descriptor", rank, refusal);
  }
}

void serve_until_done(WorldState& world) {
  using namespace std::chrono_literals;
  std::vector<pollfd> polls;
  // Asked as soon as a wait is over: what ranks did meanwhile may end the world in the same turn.
  std::optional<PauseWatch> watch;
  const auto notice_pause = [&] {
    const std::chrono::milliseconds pause = watch ? watch->pause() : 0ms;
    if (pause.count() == 0) return;
    add_host_pause(pause);
    for (WorldState* running : running_worlds()) running->on_pause(pause);
    watch.emplace(Clock::now());
  };
  while (!world.is_done()) {
    notice_pause();
    const int signal = interrupt_signal();  // read once: one that comes from here on is in the pipe
    polls.clear();
    Clock::time_point next = Clock::time_point::max();
    const Clock::time_point now = Clock::now();
    for (WorldState* running : running_worlds()) {
      if (signal != 0) running->interrupt(signal);
      running->on_timers(now);
      running->add_polls(polls);
      next = std::min(next, running->next_timer());
    }
    if (world.is_done()) return;
    const int signal_fd = signal == 0 ? interrupt_fd() : -1;
    polls.push_back({signal_fd, POLLIN, 0});
    watch.emplace(next);
    wait_for(polls, next);
    notice_pause();
    for (const pollfd& ready : polls) {
      if (ready.revents == 0 || ready.fd == signal_fd) continue;
      for (WorldState* running : running_worlds()) running->on_ready(ready.fd);
    }
  }
}

}  // namespace isoshard
