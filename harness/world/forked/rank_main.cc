// SPDX-License-Identifier: Apache-2.0
/// The rank's side of a forked world.
#include "harness/world/forked/rank_main.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <mutex>
#include <utility>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/memory/memory_pool.h"
#include "harness/world/end_process.h"
#include "harness/world/forked/crash_handler.h"
#include "harness/world/forked/frames.h"
#include "harness/world/forked/hooks.h"
#include "harness/world/forked/leaked_processes.h"
#include "harness/world/interrupt.h"
#include "harness/world/process_name.h"
#include "harness/world/tensor_memory.h"

namespace isoshard {

// GoogleTest's flag; null in programs without GoogleTest.
[[gnu::weak]] extern bool gtest_throws_on_failure asm("_ZN7testing28FLAGS_gtest_throw_on_failureE");

namespace {

constexpr std::size_t kResultPartBytes = 256 * 1024;

WorldHooks& hooks() {
  static WorldHooks instance;
  return instance;
}

// The way to the controller, open until the process ends. Any thread may send.
class Channel {
 public:
  void open(int fd) noexcept { fd_ = fd; }
  template <class Payload>
  void send(FrameType type, const Payload& payload) {
    const std::lock_guard lock(mutex_);
    if (fd_ < 0) throw UsageError("forward_failure must be called in a rank of a forked world");
    send_frame(fd_, type, payload);
  }

 private:
  int fd_ = -1;
  std::mutex mutex_;
};

// Never destroyed: threads that outlive the body may still use it.
Channel& channel() {
  static Channel& instance = *new Channel;
  return instance;
}

class ForkedRank final : public Rank {
 public:
  ForkedRank(const RankStart& start, std::unique_ptr<Communicator> comm)
      : rank_(start.rank), size_(start.options->size), slot_(*start.slot), comm_(std::move(comm)) {}
  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] Communicator& comm() noexcept override { return *comm_; }
  void set_phase(std::string_view phase) noexcept override { slot_.phase.set(phase); }

  void post_result(std::span<const std::byte> bytes) override {
    if (std::exchange(has_posted_, true))
      throw UsageError("post_result was called twice; a rank has one result");
    if (bytes.size() > kMaxResultBytes) {
      throw InfrastructureError("a result of " + std::to_string(bytes.size()) +
                                " bytes is too large for the result channel (limit " +
                                std::to_string(kMaxResultBytes) + "): keep large data in a memfd");
    }
    while (!bytes.empty()) {
      const auto part = bytes.first(std::min(bytes.size(), kResultPartBytes));
      channel().send(FrameType::kResultPart, part);
      bytes = bytes.subspan(part.size());
    }
  }

 private:
  int rank_;
  int size_;
  RankSlot& slot_;
  std::unique_ptr<Communicator> comm_;
  bool has_posted_ = false;
};

// Something that ends at once, however often it is read: /dev/null, or where there is none a pipe
// that nobody writes.
int open_nothing() {
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null >= 0) return null;
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return -1;
  ::close(ends[1]);
  return ends[0];
}

// 0, 1, 2 become nothing and the pipes; every descriptor of the controller is closed.
bool take_descriptors(const RankStart& start) {
  const int null = open_nothing();
  if (null < 0 || ::dup2(null, STDIN_FILENO) < 0 ||
      ::dup2(start.standard_output, STDOUT_FILENO) < 0 ||
      ::dup2(start.standard_error, STDERR_FILENO) < 0) {
    return false;
  }
  if (null != STDIN_FILENO) ::close(null);
  ::close(start.standard_output);
  ::close(start.standard_error);
  for (const int fd : start.to_close) ::close(fd);
  return true;
}

// A parent-death signal comes when the thread ends that forked this process, too.
pid_t controller_of_rank = 0;
void on_parent_death(int /*signal*/) {
  if (::getppid() != controller_of_rank) ::kill(::getpid(), SIGKILL);
}

// Two ways, because each has a gap. The end of the pipe kills even a rank that is stopped or blocks
// signals, but does not come while a process that the controller forked, without an exec, holds the
// other end. The parent-death signal comes in any case, but needs a rank that runs.
void die_with_controller(const RankStart& start) noexcept {
  constexpr int kParentDied = SIGPWR;  // which nothing else uses, and which ends a process, too
  controller_of_rank = start.controller;
  struct sigaction action {};
  action.sa_handler = on_parent_death;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(kParentDied, &action, nullptr);
  ::prctl(PR_SET_PDEATHSIG, kParentDied);
  if (::fcntl(start.tether, F_SETOWN, ::getpid()) != 0 ||
      ::fcntl(start.tether, F_SETSIG, SIGKILL) != 0 ||
      ::fcntl(start.tether, F_SETFL, O_ASYNC | O_NONBLOCK) != 0)
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != start.controller) ::_exit(1);  // it died before the lines above
}

// Nobody forwards expectations where no hooks are set. There the first one that fails throws, so
// that it is not lost with the rank.
void throw_failed_expectations() {
  if (&gtest_throws_on_failure != nullptr) gtest_throws_on_failure = true;
}

void run_body(const RankStart& start) {
  if (hooks().rank_begins) {
    hooks().rank_begins();
  } else {
    throw_failed_expectations();
  }
  {
    std::unique_ptr<Communicator> comm = start.world->communicator(start.rank);
    if (start.options->decorate) comm = start.options->decorate(std::move(comm), start.rank);
    ForkedRank rank(start, std::move(comm));
    (*start.body)(rank);
  }
  if (hooks().rank_returned) hooks().rank_returned();
}

}  // namespace

void set_world_hooks(WorldHooks new_hooks) {
  hooks() = std::move(new_hooks);
}

void call_world_hooks(int size) {
  (void)program_pool();  // before the first fork
  if (const auto hook = std::exchange(hooks().before_first_world, nullptr)) hook();
  if (hooks().before_world) hooks().before_world(size);
}

void forward_failure(const ForwardedFailure& failure) {
  PayloadWriter payload;
  const std::string_view text = std::string_view(failure.text).substr(0, kResultPartBytes);
  payload.number(static_cast<std::uint64_t>(failure.line))
      .number(failure.fatal ? 1 : 0)
      .text(failure.file)
      .text(text);
  channel().send(FrameType::kFailure, payload.bytes());
}

void rank_main(const RankStart& start) noexcept {
  die_with_controller(start);
  wear_mark(start.mark);
  name_process(start.options->process_name);
  adopt_orphans();
  leave_interrupts_to_controller();
  if (!take_descriptors(start)) ::_exit(1);
  // A crash loses no finished line. A buffer of its own, because a stream in use keeps its old mode
  // with its old buffer.
  static std::array<char, 8192> buffer;
  std::setvbuf(stdout, buffer.data(), _IOLBF, buffer.size());
  install_crash_handlers(start.rank, *start.slot);
  prepare_tensor_memory(start.world_number);
  channel().open(start.channel);
  const pid_t own = ::getpid();
  try {
    try {
      run_body(start);
      require_unchanged_inputs();
    } catch (const FileError& error) {
      channel().send(FrameType::kFileError, error.what());
    } catch (const CommError& error) {
      channel().send(FrameType::kCommError, error.what());
    } catch (...) {
      // which explains whatever came of it
      const std::string changed = MappedFile::problem_of_any();
      channel().send(changed.empty() ? FrameType::kException : FrameType::kFileError,
                     changed.empty() ? current_exception_in_words() : changed);
    }
    if (::getpid() != own) ::_exit(1);  // a process that the body forked and let return
    if (const LeakedProcesses leaked = end_all_children(); !leaked.words.empty())
      channel().send(FrameType::kLeak, leaked.words);
    channel().send(FrameType::kGoodbye, std::string_view());
  } catch (...) {  // the channel is broken: the controller sees an end without a goodbye
    ::_exit(1);
  }
  end_process(0);
}

}  // namespace isoshard
