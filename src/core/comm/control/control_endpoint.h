// SPDX-License-Identifier: Apache-2.0
/// One process's end of a world whose ranks send packets to each other: who waits for whom, aborts,
/// deadline. How packets travel is its subclass's.
///
/// Words. A *packet* is a small message that its receiver takes whenever it polls: the
/// announcement of a call, the header of a transfer, a waiting rank's lane of the journal, or an
/// abort. Packets of one rank arrive in the order in which it sent them. *Data* are the bytes of
/// tensors; they move only when both sides have announced them.
///
/// Every rank holds a journal of all ranks. Its own lane is exact. Those of others hold what they
/// announced here, and where they were in their last long wait: a rank that has waited for
/// kTellAfter tells all its whereabouts. A second journal holds those of waiting ranks only. As
/// packets keep their order, a circle of waits in it that goes through this rank is a deadlock:
/// what a rank waits for has not come, as the next rank of the circle is stuck, up to this rank,
/// which knows what it has sent.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/comm/collective.h"
#include "core/comm/control/packet.h"
#include "core/comm/journal.h"

namespace isoshard {

/// Ranks   local; one thread at a time.
class ControlEndpoint {
 public:
  enum class AbortKind : std::uint8_t { kFailure = 1, kTimeout = 2 };
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;

  /// `shared_journal`: zeroed memory that all ranks see (they are processes of one host), in which
  /// every lane is exact; null: memory of this process.
  ControlEndpoint(int rank, int size, ReductionOrder order, std::byte* shared_journal = nullptr);
  virtual ~ControlEndpoint() = default;
  ControlEndpoint(const ControlEndpoint&) = delete;
  ControlEndpoint& operator=(const ControlEndpoint&) = delete;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] ReductionOrder reduction_order() const noexcept { return order_; }
  [[nodiscard]] Journal& journal() noexcept { return journal_; }

  /// Sends a packet. Does not wait.
  virtual void post(int world_rank, const Bytes& packet) = 0;
  void post_to_all(const Bytes& packet);
  /// The oldest packet of a group or channel from a rank that has not been taken; null if there is
  /// none.
  [[nodiscard]] Packet* waiting_packet(std::uint64_t group_id, int world_rank);
  [[nodiscard]] Packet take_packet(std::uint64_t group_id, int world_rank);

  /// Takes packets and moves on what is under way. Does not wait.
  void poll();
  /// Polls until done() is true. `moves_data`: bytes are under way, which move only when polled.
  /// `awaited`: the ranks without which it cannot come true. done() may remove those that have done
  /// their part; they may leave the world then.
  /// Errors   CommError when the world is aborted, ranks wait in a circle or an awaited one is
  ///          gone; TimeoutError.
  void wait_until(const std::function<bool()>& done, const bool& moves_data,
                  const RankSet* awaited = nullptr);
  /// Called in every poll: what moves transfers.
  void set_advance(std::function<void()> advance) { advance_ = std::move(advance); }

  /// Called between two polls of a wait; empty: nothing.
  void set_idle(std::function<void()> idle) { idle_ = std::move(idle); }

  /// From now on an abort also says that the process ends in an abort of its job.
  void ends_process_in_abort() noexcept { ends_process_ = true; }
  void abort(AbortKind kind, std::string_view reason) noexcept;
  [[nodiscard]] bool is_aborted() const noexcept { return abort_kind_.has_value(); }
  /// After all packets that have come are taken.
  [[nodiscard]] bool is_aborted_by_now() {
    take_all_packets();
    return is_aborted();
  }
  [[noreturn]] void throw_abort() const;
  [[noreturn]] void fail(const std::string& reason);
  void set_deadline(std::chrono::steady_clock::time_point deadline) noexcept {
    deadline_ = deadline;
  }
  /// For how long one call may wait; without a value as long as it takes.
  void set_patience(std::optional<std::chrono::milliseconds> patience) noexcept {
    patience_ = patience;
  }

  /// The number of the next group that this rank leads, and room for `num_ids` ids in its lane.
  [[nodiscard]] std::uint32_t num_groups_led() const noexcept { return num_groups_led_; }
  void count_group_led() noexcept { ++num_groups_led_; }
  /// Errors   InfrastructureError if a rank's journal has no room for another group or channel.
  void take_group_id();

 protected:
  [[nodiscard]] std::optional<std::chrono::milliseconds> patience() const noexcept {
    return patience_;
  }
  /// Empty: the world is not aborted.
  [[nodiscard]] const std::string& abort_reason() const noexcept { return abort_reason_; }
  /// Calls handle() for every packet that has come.
  virtual void take_all_packets() = 0;
  /// Moves on what was posted.
  virtual void flush() = 0;
  /// Between two polls of a wait. It may return early, when a packet has come.
  virtual void pause(bool moves_data) noexcept = 0;
  /// The job ends with this process.
  virtual void end_in_abort() noexcept {}
  /// Why a rank of the set will not announce anything any more; empty if all are there.
  /// `moves_data` asks about ranks that must still move bytes.
  [[nodiscard]] virtual std::string why_gone(const RankSet& /*ranks*/, bool /*moves_data*/) {
    return {};
  }
  void handle(Packet packet, int from);
  /// Of an abort that another rank, or whoever started the world, made.
  void take_abort(AbortKind kind, std::string_view reason);

 private:
  void tell_whereabouts();
  void look_for_circle();

  int rank_;
  int size_;
  ReductionOrder order_;
  std::vector<std::byte> journal_memory_;
  bool has_shared_journal_;
  Journal journal_;
  Journal waits_;  ///< where ranks were in their last long wait
  std::map<std::pair<std::uint64_t, int>, std::deque<Packet>> inbox_;
  std::function<void()> advance_;
  std::function<void()> idle_;
  std::optional<AbortKind> abort_kind_;
  std::string abort_reason_;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
  std::optional<std::chrono::milliseconds> patience_;
  std::uint32_t num_groups_led_ = 1;
  std::uint32_t num_ids_ = 1;
  bool ends_process_ = false;
  bool has_news_ = false;  ///< of waits, since the last look for circles
};

}  // namespace isoshard
