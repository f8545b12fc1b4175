// SPDX-License-Identifier: Apache-2.0
/// A barrier on two words: a count of arrivals and an epoch that the last to arrive moves on.
#include "core/comm/region/meeting.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/comm/region/futex.h"

namespace isoshard {
namespace {

using std::chrono::steady_clock;
using MeetingWord = std::atomic<std::uint32_t>;

// Every so often a sleeper looks by itself whether the deadline was moved or a circle of waits has
// closed.
constexpr std::chrono::nanoseconds kLongestSleep = std::chrono::milliseconds(50);

// Where messages that do not fit into their slots are on their way beside.
constexpr std::chrono::nanoseconds kShortSleep = std::chrono::milliseconds(1);

int num_cpus() noexcept {
  static const int count = [] {
    cpu_set_t cpus;
    return sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
  }();
  return count;
}

void pause_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Spinning only helps while the ranks waited for can run at the same time.
bool spin(const MeetingWord& word, std::uint32_t epoch, int world_size) noexcept {
  const int num_spins = world_size <= num_cpus() ? 400 : 50;
  for (int i = 0; i < num_spins; ++i) {
    if (word.load(std::memory_order_acquire) != epoch) return true;
    pause_cpu();
  }
  return false;
}

/// Giving the core away, again and again for a moment, takes less time than sleeping and being
/// woken: where there are more ranks than cores, because the others need it; where there are not,
/// because a core without work halts, which a virtual machine leaves slowly. But the core may go to
/// another program, for milliseconds, where a sleeper is woken at once: then no more for a while.
class Yields {
 public:
  // Whether the word moved on.
  bool until_moved(const MeetingWord& word, std::uint32_t epoch) noexcept {
    auto now = steady_clock::now();
    if (now < not_before_) return false;
    for (const auto end = now + kLongest; now < end;) {
      sched_yield();
      const auto before = std::exchange(now, steady_clock::now());
      // to a rank that computes, perhaps: sleeping is as good then
      if (now - before > kLost) not_before_ = now + kPause;
      if (word.load(std::memory_order_acquire) != epoch) return true;
    }
    return false;
  }

 private:
  static constexpr std::chrono::microseconds kLongest{100};
  static constexpr std::chrono::milliseconds kLost{1}, kPause{200};
  steady_clock::time_point not_before_{};
};

void sleep_until_moved(MeetingWord& word, MeetingWord& sleepers, std::uint32_t epoch,
                       std::chrono::nanoseconds longest) noexcept {
  sleepers.fetch_add(1);
  futex_wait(word, epoch, longest);
  sleepers.fetch_sub(1);
}

void wait_until_moved(WorldRegion& region, MeetingWord& word, MeetingWord& sleepers,
                      std::uint32_t epoch, int world_rank, const std::function<bool()>& meanwhile) {
  if (spin(word, epoch, region.num_ranks())) return;
  static thread_local Yields yields;
  if (yields.until_moved(word, epoch)) return;
  while (word.load(std::memory_order_acquire) == epoch) {
    const bool is_busy = meanwhile && meanwhile();
    if (const std::string circle = region.journal().describe_circular_wait(world_rank);
        !circle.empty()) {
      region.abort(
          world_rank, WorldRegion::AbortKind::kFailure,
          fmt::format("deadlock: {}; all ranks of a group must call it in the same order", circle));
      return;
    }
    std::chrono::nanoseconds longest = is_busy ? kShortSleep : kLongestSleep;
    if (const auto deadline = region.deadline()) {
      const std::chrono::nanoseconds left = *deadline - steady_clock::now();
      if (left.count() <= 0) {
        region.abort(world_rank, WorldRegion::AbortKind::kTimeout,
                     fmt::format("deadline passed: {}", region.journal().describe_hang()));
        return;
      }
      longest = std::min(longest, left);
    }
    sleep_until_moved(word, sleepers, epoch, longest);
  }
}

}  // namespace

void meet(WorldRegion& region, GroupBlock& group, int world_rank,
          const std::function<bool()>& meanwhile) {
  const std::uint32_t epoch = group.epoch.load(std::memory_order_acquire);
  if ((epoch & 1U) != 0) region.throw_abort();
  if (group.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      static_cast<std::uint32_t>(group.size)) {
    group.arrived.store(0, std::memory_order_relaxed);
    group.epoch.fetch_add(2);
    if (group.sleepers.load() != 0) futex_wake_all(group.epoch);
  } else {
    wait_until_moved(region, group.epoch, group.sleepers, epoch, world_rank, meanwhile);
    // A meeting that took place is one, even if the world was aborted just after it: the next one
    // fails.
    if ((group.epoch.load(std::memory_order_acquire) | 1U) == (epoch | 1U)) region.throw_abort();
  }
}

void wait_for_bell(WorldRegion& region, int world_rank, std::uint32_t rung) {
  wait_until_moved(region, region.bell(world_rank), region.sleepers(world_rank), rung, world_rank,
                   {});
}

}  // namespace isoshard
