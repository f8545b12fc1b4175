// SPDX-License-Identifier: Apache-2.0
/// What the controller does when something comes from a rank, when a rank ends, and when time is up.
#include "harness/world/world_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <fstream>

#include "harness/world/crash_handler.h"

namespace isoshard {
namespace {

using namespace std::chrono_literals;

constexpr auto kReleaseGrace = 2000ms;       // for peers of a failed rank, until they reach a collective
constexpr auto kDumpGrace = 500ms;           // for a stack dump
constexpr auto kDeadlineGrace = 500ms;       // for ranks released at the deadline
constexpr auto kKillGrace = 5000ms;          // then a rank counts as unkillable
constexpr auto kDesertedLookInterval = 50ms;
constexpr int kDesertedLooks = 3;            // the same wait seen that often is no ordinary delay
constexpr int kMaxReadsPerTurn = 16;         // of 64 KiB, so that one loud rank does not keep the others waiting

std::array<char, 64 * 1024>& read_buffer() {
  static std::array<char, 64 * 1024> buffer;
  return buffer;
}

// Calls take(bytes) with what is there. Returns false at the end of the stream.
template <class Take>
bool read_available(const UniqueFd& fd, Take take) {
  for (int turn = 0; turn < kMaxReadsPerTurn; ++turn) {
    const ssize_t count = ::read(fd.get(), read_buffer().data(), read_buffer().size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno == EAGAIN;
    if (count == 0) return false;
    take(std::string_view(read_buffer().data(), static_cast<std::size_t>(count)));
    if (static_cast<std::size_t>(count) < read_buffer().size() / 2) return true;
  }
  return true;
}

// The letter of /proc/PID/stat: R, S, D, T, ...; '?' if it cannot be read.
char process_state(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  std::getline(file, line);
  const std::size_t end = line.rfind(')');
  return end == std::string::npos || end + 2 >= line.size() ? '?' : line[end + 2];
}

std::string state_in_words(char state) {
  if (state == 'T' || state == 't') return "is stopped (SIGSTOP)";
  if (state == 'D') return "is blocked in the kernel";
  return state == 'R' ? "is computing" : "is waiting outside a collective";
}

bool waits_in_collective(const Journal& journal, int rank) {
  const auto entry = journal.last(rank);
  return entry && entry->state == CallState::kEntered;
}

bool has_entered(const Journal& journal, int rank, const CollectiveCall& call) {
  return std::ranges::any_of(journal.entries(rank), [&](const JournalEntry& entry) {
    return entry.call.group_id == call.group_id && entry.call.group_sequence >= call.group_sequence;
  });
}

// The first member of `entry`'s group that is not in the call and for which `candidate` holds; -1 if there is none.
template <class Candidate>
int missing_member(const Journal& journal, const JournalEntry& entry, Candidate candidate) {
  for (int member = 0; member < journal.num_ranks(); ++member) {
    if ((entry.group_members >> member & 1U) != 0 && candidate(member) && !has_entered(journal, member, entry.call)) return member;
  }
  return -1;
}

std::string place_in_words(const RankReport& report) {
  return report.phase.empty() ? report.where : fmt::format("{}, phase {}", report.where, report.phase);
}

}  // namespace

// ---- what comes from a rank -------------------------------------------------------------------------------------------------

void WorldState::on_frame(RankProcess& process, FrameType type, std::span<const std::byte> payload) {
  const std::string_view text(reinterpret_cast<const char*>(payload.data()), payload.size());
  const int rank = process.report.rank;
  switch (type) {
    case FrameType::kResultPart: {
      std::vector<std::byte>& result = process.report.result;
      if (result.size() + payload.size() > kMaxResultBytes) throw ProtocolError("protocol: a result beyond the limit");
      result.insert(result.end(), payload.begin(), payload.end());
      return;
    }
    case FrameType::kFailure: {
      PayloadReader reader(payload);
      ForwardedFailure failure;
      failure.line = static_cast<int>(reader.number());
      failure.fatal = reader.number() != 0;
      failure.file = reader.text();
      failure.text = reader.text();
      process.report.failures.push_back(std::move(failure));
      return;
    }
    case FrameType::kCommError:
      process.comm_error = text;
      if (first_comm_error_ < 0) first_comm_error_ = rank;
      release(kReleaseGrace, fmt::format("rank {} left after: {}", rank, text));
      return;
    case FrameType::kException:
      process.exception = text;
      process.report.where = shm_.journal().last_call_in_words(rank);
      process.report.phase = slots_[rank].phase.str();
      fail(rank, fmt::format("rank {} threw {}: {}", rank, place_in_words(process.report), text));
      return;
    case FrameType::kGoodbye: {
      process.said_goodbye = true;
      const auto fatal = std::ranges::find_if(process.report.failures, &ForwardedFailure::fatal);
      if (fatal != process.report.failures.end()) {
        fail(rank, fmt::format("rank {} returned after the failed assertion at {}:{}", rank, fatal->file, fatal->line));
      }
      if (phase_ == WorldPhase::kRunning && !next_look_) next_look_ = Clock::now() + kDesertedLookInterval;
      return;
    }
  }
}

void WorldState::read_channel(RankProcess& process) {
  bool is_open = true;
  try {
    is_open = read_available(process.channel, [&](std::string_view bytes) { process.parser->feed(std::as_bytes(std::span(bytes))); });
    if (!is_open) process.parser->finish();
  } catch (const ProtocolError& error) {
    process.protocol_error = error.what();
    process.is_protocol_kill = is_open;
    if (is_open) ::kill(process.pid, SIGKILL);
    is_open = false;
  }
  if (!is_open) process.channel.reset();
}

void WorldState::add_polls(std::vector<pollfd>& polls) {
  for (const RankProcess& process : processes_) {
    if (process.is_gone) continue;
    for (const UniqueFd* fd : {&process.pidfd, &process.channel, &process.standard_output, &process.standard_error}) {
      if (fd->is_open()) polls.push_back({fd->get(), POLLIN, 0});
    }
  }
}

void WorldState::on_ready(int fd) {
  for (RankProcess& process : processes_) {
    if (process.is_gone) continue;
    if (process.channel.get() == fd) return read_channel(process);
    for (auto [stream, text] : {std::pair{&process.standard_output, &process.output_text},
                                std::pair{&process.standard_error, &process.error_text}}) {
      if (stream->get() != fd) continue;
      if (!read_available(*stream, [sink = text](std::string_view bytes) { sink->append(bytes); })) stream->reset();
      return;
    }
    if (process.pidfd.get() == fd) return reap(process);
  }
}

// ---- the end of a rank ------------------------------------------------------------------------------------------------------

// What an ended rank left in its pipes. A process that it left behind may hold them open: no waiting for their end.
void WorldState::drain(RankProcess& process) {
  if (process.channel.is_open()) read_channel(process);
  constexpr int kMaxTurns = 4;  // more than any pipe or socket holds
  for (int turn = 0; turn < kMaxTurns; ++turn) {
    if (process.channel.is_open()) read_channel(process);
  }
  for (auto [stream, text] : {std::pair{&process.standard_output, &process.output_text},
                              std::pair{&process.standard_error, &process.error_text}}) {
    if (stream->is_open()) read_available(*stream, [sink = text](std::string_view bytes) { sink->append(bytes); });
    stream->reset();
  }
  process.channel.reset();
}

void WorldState::reap(RankProcess& process) {
  int status = 0;
  rusage usage{};
  const pid_t reaped = ::wait4(process.pid, &status, WNOHANG, &usage);
  if (reaped == 0 || (reaped < 0 && errno == EINTR)) return;
  drain(process);
  process.is_gone = true;
  process.pidfd.reset();
  process.report.peak_rss_kib = usage.ru_maxrss;
  process.report.standard_output = process.output_text.text();
  process.report.standard_error = process.error_text.text();
  const int rank = process.report.rank;
  if (!process.exception) {
    process.report.where = shm_.journal().last_call_in_words(rank);
    process.report.phase = slots_[rank].phase.str();
  }
  classify(process, status);
  if (is_done()) finish();
}

void WorldState::classify(RankProcess& process, int status) {
  RankReport& report = process.report;
  const int rank = report.rank;
  report.code = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
  const std::string place = place_in_words(report);
  // A rank that was killed inside a frame is not to blame for the cut: its signal says what happened.
  if (process.protocol_error && (process.is_protocol_kill || !WIFSIGNALED(status))) {
    report.end = RankEnd::kProtocol;
    report.message = *process.protocol_error;
    fail(rank, fmt::format("rank {} broke its result channel {}: {}", rank, place, report.message));
  } else if (process.is_hung) {
    report.end = RankEnd::kHung;
    const std::string trace = backtrace_in(report.standard_error);
    report.message = process.said_goodbye ? "its body had returned, it hung in teardown" : "still running at the deadline";
    if (!trace.empty()) report.message += "\n" + trace;
  } else if (process.is_stopped) {
    report.end = RankEnd::kReleased;
    report.message = "stopped by the controller: " + cause_;
  } else if (WIFSIGNALED(status)) {
    report.end = RankEnd::kSignaled;
    report.message = signal_name(report.code);
    if (report.code == SIGKILL) report.message += fmt::format(" (from outside, or out of memory; its peak was {} KiB)", report.peak_rss_kib);
    if (const std::string words = slots_[rank].last_words.str(); !words.empty()) report.message += ", " + words;
    fail(rank, fmt::format("rank {} killed by {} {}", rank, signal_name(report.code), place));
    if (const std::string trace = backtrace_in(report.standard_error); !trace.empty()) report.message += "\n" + trace;
  } else if (process.exception || process.comm_error) {
    report.end = process.exception ? RankEnd::kThrew : RankEnd::kReleased;
    report.message = process.exception ? *process.exception : *process.comm_error;
  } else if (process.said_goodbye && report.code == 0) {
    report.end = RankEnd::kReturned;
  } else {
    report.end = RankEnd::kExited;
    report.message = process.said_goodbye ? fmt::format("exited with status {} after its body had returned", report.code)
                                          : fmt::format("exited with status {} before its body returned", report.code);
    if (!process.said_goodbye && !report.result.empty()) report.message += ", although it had posted a result";
    fail(rank, fmt::format("rank {} {}, {}", rank, report.message, place));
  }
}

bool WorldState::is_done() const noexcept { return std::ranges::all_of(processes_, &RankProcess::is_gone); }

// Without any other failure the first CommError is the cause (mismatched calls, for example), not a consequence.
void WorldState::finish() {
  if (finished_) return;
  finished_ = true;
  if (cause_.empty() && first_comm_error_ >= 0) {
    culprit_ = first_comm_error_;
    RankReport& report = process(culprit_).report;
    if (report.end == RankEnd::kReleased) report.end = RankEnd::kThrew;
    cause_ = fmt::format("rank {} failed {}: {}", culprit_, place_in_words(report), *process(culprit_).comm_error);
  }
}

WorldReport WorldState::report() const {
  WorldReport result{.name = options_.name, .ranks = {}, .culprit = culprit_, .cause = cause_, .interrupted = interrupted_};
  for (const RankProcess& process : processes_) result.ranks.push_back(process.report);
  return result;
}

// ---- ending a world early ---------------------------------------------------------------------------------------------------

void WorldState::release(std::chrono::milliseconds grace, const std::string& reason) {
  shm_.abort(reason);
  if (phase_ >= WorldPhase::kReleasing) return;
  phase_ = WorldPhase::kReleasing;
  next_step_ = Clock::now() + grace;
  next_look_.reset();
}

void WorldState::fail(int culprit, const std::string& cause) {
  if (cause_.empty()) {
    culprit_ = culprit;
    cause_ = cause;
  }
  release(kReleaseGrace, cause);
}

void WorldState::stop(const std::string& cause) {
  if (is_done()) return;
  if (cause_.empty()) cause_ = cause;
  shm_.abort(cause);
  kill_rest(false);
}

void WorldState::interrupt(int signal) {
  if (interrupted_ || is_done()) return;
  interrupted_ = true;
  stop("interrupted by " + signal_name(signal));
}

void WorldState::kill_rest(bool is_hang) {
  for (RankProcess& process : processes_) {
    if (process.is_gone) continue;
    (is_hang ? process.is_hung : process.is_stopped) = true;
    ::kill(process.pid, SIGKILL);
  }
  phase_ = WorldPhase::kKilled;
  next_step_ = Clock::now() + kKillGrace;
  next_look_.reset();
}

void WorldState::begin_dump(Clock::time_point now) {
  deadline_passed_ = true;
  const Journal& journal = shm_.journal();
  std::vector<std::string> clauses;
  if (std::string words = journal.describe_hang(); !words.empty()) clauses.push_back(std::move(words));
  for (const RankProcess& process : processes_) {
    if (process.is_gone) continue;
    const int rank = process.report.rank;
    if (const auto entry = journal.last(rank); culprit_ < 0 && waits_in_collective(journal, rank)) {
      culprit_ = missing_member(journal, *entry, [](int) { return true; });
    }
    const char state = process_state(process.pid);
    if (!waits_in_collective(journal, rank)) clauses.push_back(fmt::format("rank {} {}", rank, state_in_words(state)));
    if (state != 'T' && state != 't') ::kill(process.pid, kDumpSignal);
  }
  for (const RankProcess& process : processes_) {
    if (culprit_ < 0 && !process.is_gone) culprit_ = process.report.rank;
  }
  cause_ = fmt::format("the deadline of {} ms passed: {}", options_.deadline.count(), fmt::join(clauses, "; "));
  phase_ = WorldPhase::kDumping;
  next_step_ = now + kDumpGrace;
  next_look_.reset();
}

void WorldState::end_dump() {
  phase_ = WorldPhase::kRunning;
  for (RankProcess& process : processes_) {
    if (process.is_gone || waits_in_collective(shm_.journal(), process.report.rank)) continue;
    process.is_hung = true;
    ::kill(process.pid, SIGKILL);
  }
  release(kDeadlineGrace, cause_);
}

void WorldState::give_up() {
  for (RankProcess& process : processes_) {
    if (process.is_gone) continue;
    process.is_gone = true;
    process.report.end = RankEnd::kHung;
    process.report.message = fmt::format("process {} is still there {} after SIGKILL (state {}); look for it by hand", process.pid,
                                         "5 s", process_state(process.pid));
    drain(process);
    process.pidfd.reset();
  }
  finish();
}

// A rank that has returned enters nothing any more: who waits for it waits in vain, and need not wait for the deadline.
void WorldState::look_for_deserted_collective(Clock::time_point now) {
  const Journal& journal = shm_.journal();
  for (const RankProcess& process : processes_) {
    const auto entry = process.said_goodbye || process.is_gone ? std::nullopt : journal.last(process.report.rank);
    if (!entry || entry->state != CallState::kEntered) continue;
    const int missing = missing_member(journal, *entry, [&](int rank) { return this->process(rank).said_goodbye; });
    if (missing < 0) continue;
    const std::pair call{process.report.rank, entry->sequence};
    deserted_looks_ = call == deserted_call_ ? deserted_looks_ + 1 : 1;
    deserted_call_ = call;
    if (deserted_looks_ >= kDesertedLooks) {
      fail(missing, fmt::format("rank {} returned from its body without a call that others wait for: {}", missing, journal.describe_hang()));
      return;
    }
    break;
  }
  next_look_ = now + kDesertedLookInterval;
}

Clock::time_point WorldState::next_timer() const noexcept {
  if (is_done()) return Clock::time_point::max();
  Clock::time_point next = next_step_.value_or(deadline_);
  if (next_look_) next = std::min(next, *next_look_);
  return next;
}

void WorldState::on_timers(Clock::time_point now) {
  if (is_done()) return;
  if (next_look_ && now >= *next_look_) look_for_deserted_collective(now);
  switch (phase_) {
    case WorldPhase::kRunning:
      if (now >= deadline_) begin_dump(now);
      return;
    case WorldPhase::kDumping: {
      const bool all_dumped = std::ranges::all_of(processes_, [&](const RankProcess& process) {
        return process.is_gone || slots_[process.report.rank].has_dumped_stack.load(std::memory_order_acquire) ||
               process_state(process.pid) == 'T';
      });
      if (all_dumped || now >= *next_step_) end_dump();
      return;
    }
    case WorldPhase::kReleasing:
      if (now >= *next_step_) kill_rest(deadline_passed_);
      return;
    case WorldPhase::kKilled:
      if (now >= *next_step_) give_up();
      return;
  }
}

}  // namespace isoshard
