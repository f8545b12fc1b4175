// SPDX-License-Identifier: Apache-2.0
/// How a world ends before its ranks do: a failure, an interruption, the deadline, and the graces
/// in between.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <csignal>
#include <fstream>

#include "harness/world/forked/crash_handler.h"
#include "harness/world/forked/world_state.h"

namespace isoshard {
namespace {

using namespace std::chrono_literals;

constexpr auto kReleaseGrace = 2000ms;  // for peers of a failed rank, until they reach a collective
constexpr auto kDumpGrace = 500ms;      // for a stack dump
constexpr auto kDeadlineGrace = 500ms;  // for ranks released at the deadline
constexpr auto kKillGrace = 5000ms;     // then a rank counts as unkillable
constexpr auto kDesertedLookInterval = 50ms;
constexpr int kDesertedLooks = 20;  // a wait that is seen so often is not an ordinary delay

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

// The first member of `entry`'s group that is not in the call and for which `candidate` holds; -1
// if there is none.
template <class Candidate>
int missing_member(const Journal& journal, const JournalEntry& entry, Candidate candidate) {
  for (int member = 0; member < journal.num_ranks(); ++member) {
    if (entry.group_members.contains(member) && candidate(member) &&
        !has_entered(journal, member, entry.call))
      return member;
  }
  return -1;
}

}  // namespace

void WorldState::release(const std::string& reason) {
  comm_->abort(reason);
  if (phase_ >= WorldPhase::kReleasing) return;
  phase_ = WorldPhase::kReleasing;
  next_step_ = Clock::now() + (deadline_passed_ ? kDeadlineGrace : kReleaseGrace);
  next_look_.reset();
}

void WorldState::fail(int culprit, const std::string& cause) {
  if (cause_.empty()) {
    culprit_ = culprit;
    cause_ = cause;
  }
  release(cause);
}

void WorldState::stop(const std::string& cause) {
  if (is_done()) return;
  if (cause_.empty()) cause_ = cause;
  comm_->abort(cause);
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
  const Journal& journal = comm_->journal();
  std::vector<std::string> clauses;
  if (std::string words = journal.describe_hang(); !words.empty())
    clauses.push_back(std::move(words));
  for (const RankProcess& process : processes_) {
    if (process.is_gone) continue;
    const int rank = process.report.rank;
    if (const auto entry = journal.last(rank); culprit_ < 0 && waits_in_collective(journal, rank)) {
      culprit_ = missing_member(journal, *entry, [](int) { return true; });
    }
    const char state = process_state(process.pid);
    if (!waits_in_collective(journal, rank))
      clauses.push_back(fmt::format("rank {} {}", rank, state_in_words(state)));
    if (state != 'T' && state != 't') ::kill(process.pid, kDumpSignal);
  }
  for (const RankProcess& process : processes_) {
    if (culprit_ < 0 && !process.is_gone) culprit_ = process.report.rank;
  }
  cause_ = fmt::format("the deadline of {} ms passed: {}", options_.deadline.count(),
                       fmt::join(clauses, "; "));
  if (host_pause_.count() > 0)
    cause_ += fmt::format("; before that the host had been suspended or stopped for {} ms",
                          host_pause_.count());
  phase_ = WorldPhase::kDumping;
  next_step_ = now + kDumpGrace;
  next_look_.reset();
}

void WorldState::end_dump() {
  phase_ = WorldPhase::kRunning;
  for (RankProcess& process : processes_) {
    if (process.is_gone || waits_in_collective(comm_->journal(), process.report.rank)) continue;
    process.is_hung = true;
    ::kill(process.pid, SIGKILL);
  }
  release(cause_);
}

void WorldState::give_up() {
  for (RankProcess& process : processes_) {
    if (process.is_gone) continue;
    process.is_gone = true;
    process.report.end = RankEnd::kHung;
    process.report.message = fmt::format(
        "process {} is still there {} s after SIGKILL (state {}); end it by hand", process.pid,
        std::chrono::duration_cast<std::chrono::seconds>(kKillGrace).count(),
        process_state(process.pid));
    drain(process);
    process.pidfd.reset();
    process.tether.reset();
  }
  finish();
}

// Every rank that is left waits in a call that some other rank of its group has not entered.
bool WorldState::all_wait_in_vain() const {
  const Journal& journal = comm_->journal();
  return std::ranges::all_of(processes_, [&](const RankProcess& process) {
    if (process.is_gone || process.said_goodbye) return true;
    const auto entry = journal.last(process.report.rank);
    return entry && entry->state == CallState::kEntered &&
           missing_member(journal, *entry, [](int) { return true; }) >= 0;
  });
}

// A rank that has returned enters nothing any more: who waits for it waits in vain, and need not
// wait for the deadline.
void WorldState::look_for_deserted_collective(Clock::time_point now) {
  const Journal& journal = comm_->journal();
  for (const RankProcess& process : processes_) {
    const auto entry =
        process.said_goodbye || process.is_gone ? std::nullopt : journal.last(process.report.rank);
    if (!entry || entry->state != CallState::kEntered) continue;
    const int missing =
        missing_member(journal, *entry, [&](int rank) { return this->process(rank).said_goodbye; });
    if (missing < 0) continue;
    const std::pair call{process.report.rank, entry->sequence};
    deserted_looks_ = call == deserted_call_ ? deserted_looks_ + 1 : 1;
    deserted_call_ = call;
    // Certain while the journal holds all calls of the missing rank; later its entry may have been
    // overwritten. It is told when the others have come as far as they can, so that the words do
    // not depend on who was looked at in between.
    const bool is_certain = journal.num_calls(missing) <= Journal::kDepth;
    if ((is_certain && all_wait_in_vain()) || deserted_looks_ >= kDesertedLooks) {
      fail(missing,
           fmt::format("rank {} returned from its body without a call that others wait for: {}",
                       missing, journal.describe_hang()));
      return;
    }
    break;
  }
  next_look_ = now + kDesertedLookInterval;
}

// Short enough that a deadline is kept to a few percent and a pause of the host is told from it.
Clock::duration WorldState::look_interval() const noexcept {
  const Clock::duration part = options_.deadline / 32;
  return std::clamp<Clock::duration>(part, 5ms, 1000ms);
}

std::uint64_t WorldState::progress_of_ranks() const {
  std::uint64_t sum = 0;
  const auto mix = [&](std::uint64_t value) {
    sum = (sum ^ value) * 0x9e3779b97f4a7c15;  // the golden ratio spreads every bit
    sum ^= sum >> 32;
  };
  const Journal& journal = comm_->journal();
  for (const RankProcess& process : processes_) {
    const int rank = process.report.rank;
    mix(process.is_gone ? 2 : process.said_goodbye ? 1 : 0);
    mix(process.report.result.size());
    mix(process.report.failures.size());
    mix(journal.num_calls(rank));
    mix(waits_in_collective(journal, rank) ? 1 : 0);
    for (const char c : slots_[rank].phase.str()) mix(static_cast<unsigned char>(c));
  }
  return sum;
}

void WorldState::look_for_progress(Clock::time_point now) {
  const Clock::duration interval = look_interval(), since = now - last_look_;
  if (since < interval) return;
  last_look_ = now;
  const std::uint64_t before = std::exchange(progress_, progress_of_ranks());
  // Where this process was stopped, or had other things to do, nobody watched.
  const bool was_watched = since < interval + 1s;
  quiet_ = was_watched && progress_ == before ? quiet_ + since : Clock::duration::zero();
}

void WorldState::on_pause(std::chrono::milliseconds pause) {
  host_pause_ += pause;
  quiet_ = Clock::duration::zero();
  last_look_ = Clock::now();
}

Clock::time_point WorldState::next_timer() const noexcept {
  if (is_done()) return Clock::time_point::max();
  Clock::time_point next = next_step_.value_or(last_look_ + look_interval());
  if (next_look_) next = std::min(next, *next_look_);
  return next;
}

void WorldState::on_timers(Clock::time_point now) {
  if (is_done()) return;
  if (next_look_ && now >= *next_look_) look_for_deserted_collective(now);
  switch (phase_) {
    case WorldPhase::kRunning:
      look_for_progress(now);
      if (quiet_ >= options_.deadline) begin_dump(now);
      return;
    case WorldPhase::kDumping: {
      const bool all_dumped = std::ranges::all_of(processes_, [&](const RankProcess& process) {
        return process.is_gone ||
               slots_[process.report.rank].has_dumped_stack.load(std::memory_order_acquire) ||
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
