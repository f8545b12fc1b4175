// SPDX-License-Identifier: Apache-2.0
/// A running world as its controller sees it, and the one loop that serves all running worlds.
#pragma once
#include <poll.h>
#include <sys/mman.h>
#include <sys/types.h>

#include <chrono>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/comm/transport.h"
#include "harness/world/forked/captured_output.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/forked/frames.h"
#include "harness/world/forked/leaked_processes.h"
#include "harness/world/forked/rank_slot.h"
#include "harness/world/forked/unique_fd.h"
#include "harness/world/interrupt.h"

namespace isoshard {

using Clock = std::chrono::steady_clock;

/// The controller's end of one rank.
struct RankProcess {
  RankReport report;
  pid_t pid = -1;
  UniqueFd pidfd;
  UniqueFd channel;
  UniqueFd standard_output;
  UniqueFd standard_error;
  UniqueFd tether;  ///< closed with the controller: the rank ends
  std::unique_ptr<FrameParser> parser;
  CapturedOutput output_text;
  CapturedOutput error_text;
  std::optional<std::string> comm_error;  ///< what() of the CommError that ended the body
  std::optional<std::string> exception;   ///< the same for any other exception
  std::optional<std::string> protocol_error;
  bool is_protocol_kill = false;  ///< killed because of protocol_error
  bool said_goodbye = false;
  bool is_hung = false;     ///< killed because it was still there after the deadline
  bool is_stopped = false;  ///< killed because the world had failed or was interrupted
  bool is_gone = false;
  bool has_memory = false;  ///< of the pool, to be taken back when nothing it started is left
};

/// Slots of all ranks in shared memory.
class SlotMemory {
 public:
  explicit SlotMemory(int num_ranks);
  ~SlotMemory();
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;
  [[nodiscard]] RankSlot& operator[](int rank) const noexcept { return slots_[rank]; }

 private:
  std::size_t bytes_;
  RankSlot* slots_;
};

/// States in the order a world goes through them; a world whose ranks all return stays in kRunning.
enum class WorldPhase {
  kRunning,
  kDumping,    ///< the deadline has passed, stacks are being written
  kReleasing,  ///< aborted; ranks may end by themselves until next_step_
  kKilled,     ///< SIGKILL sent to all that were left
};

/// Guarantees   only ever waits for, signals and reaps its own ranks.
class WorldState {
 public:
  WorldState(WorldOptions options, ForkedWorld::Body body);
  ~WorldState();
  WorldState(const WorldState&) = delete;
  WorldState& operator=(const WorldState&) = delete;

  [[nodiscard]] bool is_done() const noexcept;
  /// Returns the report. Call it once, when is_done().
  [[nodiscard]] WorldReport take_report();
  /// SIGKILL to all ranks that are left; the caller then serves until is_done().
  void stop(const std::string& cause);
  void interrupt(int signal);

  // For the loop.
  void add_polls(std::vector<pollfd>& polls);
  void on_ready(int fd);
  [[nodiscard]] Clock::time_point next_timer() const noexcept;
  void on_timers(Clock::time_point now);
  /// The host did not run for so long.
  void on_pause(std::chrono::milliseconds pause);
  /// All descriptors that the controller holds for this world.
  [[nodiscard]] std::vector<int> descriptors() const;
  [[nodiscard]] bool is_owner() const noexcept;

 private:
  /// The running worlds; the last one makes the process what it was.
  void leave() noexcept;
  void start_rank(int rank);
  [[nodiscard]] RankProcess& process(int rank) {
    return processes_[static_cast<std::size_t>(rank)];
  }

  void read_channel(RankProcess& process);
  void on_frame(RankProcess& process, FrameType type, std::span<const std::byte> payload);
  void drain(RankProcess& process);
  void reap(RankProcess& process);
  void classify(RankProcess& process, int status);
  void finish();
  /// False if one is still there.
  bool end_orphans();

  /// The first failure names the culprit and releases the peers; later ones change nothing.
  void fail(int culprit, const std::string& cause);
  /// Lets peers fail at their next collective; kills who is left after a grace.
  void release(const std::string& reason);
  void begin_dump(Clock::time_point now);
  void end_dump();
  void kill_rest(bool is_hang);
  void give_up();
  /// Whether ranks got any further, and how long the controller has watched them in vain.
  void look_for_progress(Clock::time_point now);
  [[nodiscard]] Clock::duration look_interval() const noexcept;
  [[nodiscard]] std::uint64_t progress_of_ranks() const;
  void look_for_deserted_collective(Clock::time_point now);
  [[nodiscard]] bool all_wait_in_vain() const;

  WorldOptions options_;
  ForkedWorld::Body body_;
  std::uint64_t number_;  ///< of the worlds of this process
  pid_t owner_;
  std::unique_ptr<CommWorld> comm_;
  SlotMemory slots_;
  std::vector<RankProcess> processes_;
  Clock::time_point last_look_;  ///< for progress
  std::uint64_t progress_ = 0;   ///< changes with every step of any rank
  Clock::duration quiet_{0};     ///< watched since the last one
  std::chrono::milliseconds host_pause_{0};
  WorldPhase phase_ = WorldPhase::kRunning;
  bool deadline_passed_ = false;
  std::optional<Clock::time_point> next_step_;  ///< when phase_ ends by time
  std::optional<Clock::time_point> next_look_;  ///< for deserted collectives
  std::pair<int, std::uint64_t> deserted_call_{-1, 0};
  int deserted_looks_ = 0;
  int culprit_ = -1;
  int first_comm_error_ = -1;
  std::string cause_;
  bool interrupted_ = false;
  bool finished_ = false;
  KeepResults keep_results_;               // a signal goes to the ranks first
  DescentMark mark_ = new_descent_mark();  ///< of the ranks and of what they start
  std::string file_error_;
};

/// Serves all running worlds of this process until `world` is done.
void serve_until_done(WorldState& world);

}  // namespace isoshard
