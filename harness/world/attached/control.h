// SPDX-License-Identifier: Apache-2.0
/// What all processes of a job have in common between the worlds of its runs.
#pragma once
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/quiet_thread.h"
#include "core/comm/attached_job.h"
#include "core/comm/communicator.h"
#include "core/comm/journal.h"
#include "harness/world/attached/hosts_of_job.h"
#include "harness/world/attached/last_words.h"
#include "harness/world/launcher.h"

namespace isoshard {

inline constexpr CallInfo kControlInfo{.purpose = Purpose::kSetup, .axis = Axis::kWorld};

/// Of the call that a process makes at its end. No other call has this purpose, so that it meets
/// none of a process that goes on.
inline constexpr CallInfo kEndOfProcess{.purpose = Purpose::kUnspecified, .axis = Axis::kWorld};
/// The exit code of a job that is ended because a process hangs.
inline constexpr int kHungJob = 4;

inline Buffer as_buffer(std::span<std::byte> bytes) {
  return {bytes.data(), static_cast<std::int64_t>(bytes.size()), Dtype::kUint8};
}

/// Between worlds a process works by itself: it computes a reference, judges, writes. Another that
/// waits for it meanwhile says so once after a deadline of the worlds, and after so many of them it
/// takes the other for hung.
inline constexpr int kDeadlinesOfOwnWork = 30;
/// Of worlds until the first is launched.
inline constexpr std::chrono::milliseconds kFirstDeadline{120'000};
/// How often a process that computes for others says that it is at it.
inline constexpr std::chrono::milliseconds kShortestBeat{50}, kLongestBeat{10'000};

inline void write_line(const std::string& line) {
  (void)!::write(STDERR_FILENO, line.data(), line.size());
}

/// What all processes have in common: a world that no run uses. A call that waits for longer than
/// its patience ends the job: a process that is stopped would otherwise be waited for forever.
class Control final : public Peers {
 public:
  using milliseconds = std::chrono::milliseconds;
  using steady_clock = std::chrono::steady_clock;

  Control(AttachedJob& job, const std::string& host)
      : job_(job),
        world_(patient_world(job)),
        comm_(world_->communicator(job.rank())),
        hosts_(find_hosts(*comm_, host)),
        host_comm_(comm_->split(own_host(), job.rank())),
        first_comm_(comm_->split(hosts().is_first(job.rank()) ? 0 : 1, job.rank())) {}

  [[nodiscard]] AttachedJob& job() noexcept { return job_; }
  [[nodiscard]] int index() const noexcept override { return job_.rank(); }
  [[nodiscard]] int count() const noexcept override { return job_.size(); }
  void broadcast(std::span<std::byte> bytes, int from) override {
    waiting([&] { comm_->broadcast(as_buffer(bytes), from, kControlInfo).wait(); });
  }
  std::int64_t sum(std::int64_t own) override {
    const Buffer number{reinterpret_cast<std::byte*>(&own), 1, Dtype::kInt64};
    waiting([&] { comm_->all_reduce(number, Reduction::kSum, kControlInfo).wait(); });
    return own;
  }
  void gather(std::span<const std::byte> own, std::span<std::byte> all) override {
    const auto size = static_cast<std::int64_t>(own.size());
    waiting([&] {
      comm_->all_gather({own.data(), size, Dtype::kUint8}, as_buffer(all), kControlInfo).wait();
    });
  }

  [[nodiscard]] const Hosts& hosts() const noexcept override { return hosts_.hosts; }
  [[nodiscard]] const std::shared_ptr<MemoryPool>& memory() const noexcept override {
    return hosts_.memory;
  }
  void broadcast_in_host(std::span<std::byte> bytes) override {
    waiting([&] { host_comm_->broadcast(as_buffer(bytes), 0, kControlInfo).wait(); });
  }
  void broadcast_to_hosts(std::span<std::byte> bytes, int from_host) override {
    waiting([&] { first_comm_->broadcast(as_buffer(bytes), from_host, kControlInfo).wait(); });
  }
  void send(std::span<const std::byte> bytes, int to_host) override {
    const auto size = static_cast<std::int64_t>(bytes.size());
    waiting([&] {
      first_comm_->send({bytes.data(), size, Dtype::kUint8}, to_host, kControlInfo).wait();
    });
  }
  void receive(std::span<std::byte> bytes, int from_host) override {
    waiting([&] { first_comm_->recv(as_buffer(bytes), from_host, kControlInfo).wait(); });
  }
  void add_difference(std::string sentence) override {
    differences_.push_back(std::move(sentence));
  }
  std::vector<std::string> take_differences() override { return std::exchange(differences_, {}); }
  /// A call failed because another process had come to its end, for reasons that it says itself.
  [[nodiscard]] bool peer_ended() const noexcept { return peer_ended_; }
  [[nodiscard]] int own_host() const {
    return hosts().host_of[static_cast<std::size_t>(job_.rank())];
  }
  void barrier() {
    waiting([&] { comm_->barrier(kControlInfo); });
  }
  void set_idle(std::function<void()> idle) { idle_ = std::move(idle); }

  /// Of a world that is launched: the longest counts from here on.
  void allow(milliseconds deadline) {
    longest_deadline_ = std::max(longest_deadline_.value_or(deadline), deadline);
    world_->set_patience(patience());
  }

  /// Returns when all processes have done their work, which does not throw and makes no call of the
  /// job; nullptr: there is none. A process that is at work tells the others so, from a thread of
  /// its own: work may take long, and a process that is stopped is found out all the same.
  void finish_together(const std::function<void()>& work) {
    std::mutex mutex;
    std::condition_variable has_news;
    bool is_done = work == nullptr;
    std::exception_ptr failure;
    const auto beat = [&] {
      for (;;) {
        std::int64_t own = 0;
        {
          std::unique_lock lock(mutex);
          has_news.wait_for(lock, std::clamp(deadline() / 4, kShortestBeat, kLongestBeat),
                            [&] { return is_done; });
          own = is_done ? 1 : 0;
        }
        if (sum(own) == count()) return;
      }
    };
    if (work == nullptr) return beat();
    std::thread thread = quiet_thread([&] {
      try {
        beat();
      } catch (...) {
        failure = std::current_exception();
      }
    });
    work();
    {
      const std::lock_guard lock(mutex);
      is_done = true;
    }
    has_news.notify_one();
    thread.join();
    if (failure) std::rethrow_exception(failure);
  }

  /// A message of any size.
  std::vector<std::byte> broadcast_message(std::vector<std::byte> message, int from) {
    auto size = static_cast<std::uint64_t>(message.size());
    broadcast(std::as_writable_bytes(std::span(&size, 1)), from);
    message.resize(size);
    broadcast(message, from);
    return message;
  }

  /// Of all processes, in their order. `patience`: for how long the slowest may take.
  std::vector<std::vector<std::byte>> gather(const std::vector<std::byte>& own,
                                             std::optional<milliseconds> patience = {}) {
    const auto num = static_cast<std::size_t>(count());
    std::vector<std::int64_t> counts(num);
    auto size = static_cast<std::int64_t>(own.size());
    const auto numbers = [](std::int64_t* data, std::size_t length) {
      return Buffer{reinterpret_cast<std::byte*>(data), static_cast<std::int64_t>(length),
                    Dtype::kInt64};
    };
    const auto get_counts = [&] {
      comm_->all_gather(numbers(&size, 1), numbers(counts.data(), num), kControlInfo).wait();
    };
    if (patience) {
      // the caller says what has run out
      has_told_ = true;
      world_->set_patience(patience);
      get_counts();
      world_->set_patience(this->patience());
    } else {
      waiting(get_counts);
    }
    std::int64_t total = 0;
    for (const std::int64_t one : counts) total += one;
    std::vector<std::byte> all(static_cast<std::size_t>(total));
    waiting([&] {
      comm_
          ->all_gather_uneven({own.data(), size, Dtype::kUint8}, {all.data(), total, Dtype::kUint8},
                              counts, kControlInfo)
          .wait();
    });
    std::vector<std::vector<std::byte>> messages;
    for (auto begin = all.begin(); const std::int64_t one : counts) {
      messages.emplace_back(begin, begin + one);
      begin += one;
    }
    return messages;
  }
  bool ended_together(std::string_view words) {
    waiting([&] { comm_->barrier(kEndOfProcess); });
    std::vector<std::byte> own(words.size());
    std::ranges::copy(std::as_bytes(std::span(words)), own.begin());
    const auto all = gather(own);
    return std::ranges::all_of(all, [&](const auto& one) { return one == all.front(); });
  }

 private:
  std::unique_ptr<AttachedWorld> patient_world(AttachedJob& job) {
    auto world = job.make_world(ReductionOrder::kOrdered);
    world->set_patience(patience());
    world->set_idle([this] {
      tell_if_late();
      if (idle_) idle_();
    });
    return world;
  }
  [[nodiscard]] milliseconds deadline() const noexcept {
    return longest_deadline_.value_or(kFirstDeadline);
  }
  [[nodiscard]] milliseconds patience() const noexcept { return kDeadlinesOfOwnWork * deadline(); }

  template <class Call>
  void waiting(const Call& call) {
    waits_since_ = steady_clock::now();
    has_told_ = false;
    try {
      call();
    } catch (const CommError& error) {
      note_end_of_peer();
      if (dynamic_cast<const TimeoutError*>(&error) == nullptr) throw;
      write_line(fmt::format(
          "isoshard: rank {} on {}: a process did not come back from its own work within {} s "
          "(30 deadlines); it is stopped or hangs, or needs a longer --deadline: {}\n",
          index(), host_name(), patience().count() / 1000, error.what()));
      job_.end_all(kHungJob);
      throw;  // never: compilers do not see it through a virtual function
    }
  }
  void note_end_of_peer() {
    for (int rank = 0; rank < count(); ++rank) {
      const auto last = world_->journal().last(rank);
      if (rank != index() && last && last->call.purpose == kEndOfProcess.purpose)
        peer_ended_ = true;
    }
  }
  // Two processes do: one of them may be the one that is waited for.
  void tell_if_late() {
    if (has_told_ || index() > 1 || steady_clock::now() - waits_since_ < deadline()) return;
    has_told_ = true;
    write_line(fmt::format(
        "isoshard: rank {} on {} has waited for {} s for work that others do between worlds; the "
        "job ends after {} s: {}\n",
        index(), host_name(), deadline().count() / 1000, patience().count() / 1000,
        world_->journal().describe_hang()));
  }

  AttachedJob& job_;
  std::optional<milliseconds> longest_deadline_;  ///< of the worlds so far
  std::function<void()> idle_;
  steady_clock::time_point waits_since_ = steady_clock::now();
  bool has_told_ = false;
  bool peer_ended_ = false;
  std::unique_ptr<AttachedWorld> world_;
  std::unique_ptr<Communicator> comm_;
  HostsOfJob hosts_;
  std::unique_ptr<Communicator> host_comm_;   ///< of the processes of this host
  std::unique_ptr<Communicator> first_comm_;  ///< of the first processes of the hosts
  std::vector<std::string> differences_;
};

}  // namespace isoshard
