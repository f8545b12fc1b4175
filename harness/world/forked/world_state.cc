// SPDX-License-Identifier: Apache-2.0
/// What the controller does when something comes from a rank and when a rank ends.
#include "harness/world/forked/world_state.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>

#include "harness/world/forked/crash_handler.h"
#include "harness/world/forked/leaked_processes.h"
#include "harness/world/tensor_memory.h"

namespace isoshard {
namespace {

// of 64 KiB, so that one loud rank does not keep the others waiting
constexpr int kMaxReadsPerTurn = 16;

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
  }
  return true;
}

std::string place_in_words(const RankReport& report) {
  return report.phase.empty() ? report.where
                              : fmt::format("{}, phase {}", report.where, report.phase);
}

}  // namespace

// ---- what comes from a rank
// -------------------------------------------------------------------------------------------------

void WorldState::on_frame(RankProcess& process, FrameType type,
                          std::span<const std::byte> payload) {
  const std::string_view text(reinterpret_cast<const char*>(payload.data()), payload.size());
  const int rank = process.report.rank;
  switch (type) {
    case FrameType::kResultPart: {
      std::vector<std::byte>& result = process.report.result;
      if (result.size() + payload.size() > kMaxResultBytes)
        throw ProtocolError("protocol: a result beyond the limit");
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
      release(fmt::format("rank {} left after: {}", rank, text));
      return;
    case FrameType::kException:
      process.exception = text;
      process.report.where = comm_->journal().last_call_in_words(rank);
      process.report.phase = slots_[rank].phase.str();
      fail(rank, fmt::format("rank {} threw {}: {}", rank, place_in_words(process.report), text));
      return;
    case FrameType::kFileError:
      process.exception = text;
      process.report.where = comm_->journal().last_call_in_words(rank);
      process.report.phase = slots_[rank].phase.str();
      if (file_error_.empty()) file_error_ = text;
      fail(rank, fmt::format("rank {} {}: {}", rank, place_in_words(process.report), text));
      return;
    case FrameType::kLeak:
      if (process.exception) return;  // which says more
      process.exception = fmt::format("leaked: {}", text);
      process.report.where = comm_->journal().last_call_in_words(rank);
      fail(rank, fmt::format("rank {} left processes behind, which were killed: {}", rank, text));
      return;
    case FrameType::kGoodbye: {
      process.said_goodbye = true;
      const auto fatal = std::ranges::find_if(process.report.failures, &ForwardedFailure::fatal);
      if (fatal != process.report.failures.end()) {
        fail(rank, fmt::format("rank {} returned after the failed assertion at {}:{}", rank,
                               fatal->file, fatal->line));
      }
      if (phase_ == WorldPhase::kRunning && !next_look_) next_look_ = Clock::now();
      return;
    }
  }
}

void WorldState::read_channel(RankProcess& process) {
  bool is_open = true;
  try {
    is_open = read_available(process.channel, [&](std::string_view bytes) {
      process.parser->feed(std::as_bytes(std::span(bytes)));
    });
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
    for (const UniqueFd* fd :
         {&process.pidfd, &process.channel, &process.standard_output, &process.standard_error}) {
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
      if (!read_available(*stream, [sink = text](std::string_view bytes) { sink->append(bytes); }))
        stream->reset();
      return;
    }
    if (process.pidfd.get() == fd) return reap(process);
  }
}

// ---- the end of a rank
// -------------------------------------------------------------------------------------------------

// What an ended rank left in its pipes. A process that it left behind may hold them open: no
// waiting for their end.
void WorldState::drain(RankProcess& process) {
  // up to 1 MiB: more than a socket or a pipe holds
  if (process.channel.is_open()) read_channel(process);
  for (auto [stream, text] : {std::pair{&process.standard_output, &process.output_text},
                              std::pair{&process.standard_error, &process.error_text}}) {
    if (stream->is_open())
      read_available(*stream, [sink = text](std::string_view bytes) { sink->append(bytes); });
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
  // What a rank has started and left running shares its memory. One that said goodbye has looked
  // after its own; of another one the memory is taken back when that is done (finish).
  process.has_memory = !process.said_goodbye;
  if (!process.has_memory) reclaim_tensor_memory(process.pid);
  process.is_gone = true;
  process.pidfd.reset();
  process.tether.reset();
  process.report.peak_rss_kib = usage.ru_maxrss;
  process.report.standard_output = process.output_text.text();
  process.report.standard_error = process.error_text.text();
  const int rank = process.report.rank;
  if (!process.exception) {
    process.report.where = comm_->journal().last_call_in_words(rank);
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
  // else it had ended before our signal came
  const bool is_killed = WIFSIGNALED(status) && report.code == SIGKILL;
  // A rank that was killed inside a frame is not to blame for the cut: its signal says what
  // happened.
  if (process.protocol_error && (process.is_protocol_kill || !WIFSIGNALED(status))) {
    report.end = RankEnd::kProtocol;
    report.message = *process.protocol_error;
    fail(rank, fmt::format("rank {} broke its result channel {}: {}", rank, place, report.message));
  } else if (process.is_hung && is_killed) {
    report.end = RankEnd::kHung;
    const std::string trace = backtrace_in(report.standard_error);
    report.message = process.said_goodbye ? "its body had returned, it hung in teardown"
                                          : "still running at the deadline";
    if (!trace.empty()) report.message += "\n" + trace;
  } else if (process.is_stopped && is_killed) {
    report.end = RankEnd::kReleased;
    report.message = "stopped by the controller: " + cause_;
  } else if (WIFSIGNALED(status)) {
    report.end = RankEnd::kSignaled;
    report.message = signal_name(report.code);
    if (report.code == SIGKILL)
      report.message += fmt::format(" (from outside, or out of memory; its peak was {} KiB)",
                                    report.peak_rss_kib);
    if (const std::string words = slots_[rank].last_words.str(); !words.empty())
      report.message += ", " + words;
    fail(rank, fmt::format("rank {} killed by {} {}", rank, signal_name(report.code), place));
    if (const std::string trace = backtrace_in(report.standard_error); !trace.empty())
      report.message += "\n" + trace;
  } else if (process.exception || process.comm_error) {
    report.end = process.exception ? RankEnd::kThrew : RankEnd::kReleased;
    report.message = process.exception ? *process.exception : *process.comm_error;
  } else if (process.said_goodbye && report.code == 0) {
    report.end = RankEnd::kReturned;
  } else {
    report.end = RankEnd::kExited;
    report.message =
        process.said_goodbye
            ? fmt::format("exited with status {} after its body had returned", report.code)
            : fmt::format("exited with status {} before its body returned", report.code);
    if (!process.said_goodbye && !report.result.empty())
      report.message += ", although it had posted a result";
    fail(rank, fmt::format("rank {} {}, {}", rank, report.message, place));
  }
}

bool WorldState::is_done() const noexcept {
  return std::ranges::all_of(processes_, &RankProcess::is_gone);
}

// Without any other failure the first CommError is the cause (mismatched calls, for example), not a
// consequence.
void WorldState::finish() {
  if (finished_) return;
  finished_ = true;
  if (end_orphans()) {
    for (RankProcess& process : processes_) {
      if (std::exchange(process.has_memory, false)) reclaim_tensor_memory(process.pid);
    }
  }
  if (cause_.empty() && first_comm_error_ >= 0) {
    culprit_ = first_comm_error_;
    RankReport& report = process(culprit_).report;
    if (report.end == RankEnd::kReleased) report.end = RankEnd::kThrew;
    cause_ = fmt::format("rank {} failed {}: {}", culprit_, place_in_words(report),
                         *process(culprit_).comm_error);
  }
}

// A rank that says goodbye has looked after its own. What the others have started is this process's
// child by now.
bool WorldState::end_orphans() {
  if (std::ranges::all_of(processes_, &RankProcess::said_goodbye)) return true;
  std::set<pid_t> known;
  // one that was given up is told already
  for (const RankProcess& process : processes_) known.insert(process.pid);
  const LeakedProcesses leaked = end_marked_children(mark_, known);
  if (leaked.words.empty()) return leaked.all_gone;
  const std::string words =
      fmt::format("processes that its ranks had left behind were killed: {}", leaked.words);
  cause_ = cause_.empty() ? words : fmt::format("{}; {}", cause_, words);
  return leaked.all_gone;
}

WorldReport WorldState::take_report() {
  WorldReport result{.name = options_.name,
                     .ranks = {},
                     .culprit = culprit_,
                     .cause = cause_,
                     .interrupted = interrupted_,
                     .file_error = file_error_,
                     .host_pause = host_pause_};
  for (RankProcess& process : processes_) result.ranks.push_back(std::move(process.report));
  return result;
}

}  // namespace isoshard
