// SPDX-License-Identifier: Apache-2.0
/// Who starts the ranks of a world.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "harness/world/world.h"

namespace isoshard {

class MemoryPool;

/// A world under way. One that is destroyed before its end is ended.
class RunningWorld {
 public:
  virtual ~RunningWorld() = default;
  /// Waits for all ranks to end. Called once.
  [[nodiscard]] virtual WorldReport wait() = 0;
};

/// Which of the processes that judge together share memory: those of one host.
struct Hosts {
  std::vector<int> host_of;        ///< by process: the number of its host
  std::vector<int> first;          ///< by host: the lowest of its processes; they ascend
  std::vector<int> num_processes;  ///< by host
  std::vector<std::string> names;  ///< by host

  [[nodiscard]] int count() const noexcept { return static_cast<int>(first.size()); }
  [[nodiscard]] bool is_first(int process) const {
    return first[static_cast<std::size_t>(host_of[static_cast<std::size_t>(process)])] == process;
  }
};

/// Processes that go the same way through a program, each with a launcher of its own: they start
/// the same worlds in the same order, and get the same reports and traces. One of them, 0, reports.
///
/// Ranks   every function is collective over them, and called in the same order by all.
class Peers {
 public:
  virtual ~Peers() = default;
  /// This process's number, from 0.
  [[nodiscard]] virtual int index() const noexcept = 0;
  [[nodiscard]] virtual int count() const noexcept = 0;
  /// Fills `bytes`, as long on all, with those of process `from`.
  virtual void broadcast(std::span<std::byte> bytes, int from) = 0;
  [[nodiscard]] virtual std::int64_t sum(std::int64_t own) = 0;
  /// Fills `all` with the `own` of every process, as long on all, in their order.
  virtual void gather(std::span<const std::byte> own, std::span<std::byte> all) = 0;

  /// Local, as memory().
  [[nodiscard]] virtual const Hosts& hosts() const noexcept = 0;
  /// What the processes of this host have in common; null where there is one alone.
  [[nodiscard]] virtual const std::shared_ptr<MemoryPool>& memory() const noexcept = 0;
  /// As broadcast, from the first process of this host to its others: collective over the host's.
  virtual void broadcast_in_host(std::span<std::byte> bytes) = 0;
  /// As broadcast, from the first process of a host to those of the others: collective over the
  /// first processes.
  virtual void broadcast_to_hosts(std::span<std::byte> bytes, int from_host) = 0;
  /// From the first process of a host to that of another one; called by these two.
  virtual void send(std::span<const std::byte> bytes, int to_host) = 0;
  virtual void receive(std::span<std::byte> bytes, int from_host) = 0;

  /// Says that what several hosts computed (WorldOptions::on_each_host) was not the same, in a
  /// sentence that is equal on all processes.
  virtual void add_difference(std::string sentence) = 0;
  /// All of them since the last call.
  [[nodiscard]] virtual std::vector<std::string> take_differences() = 0;
};

/// Starts the ranks of worlds. ForkedLauncher
/// (harness/world/forked/forked_world.h) forks them; with AttachedLauncher
/// (harness/world/attached/attached_launcher.h) they are processes that somebody else has started.
/// Launchers that keep their ranks from world to world belong beside them.
///
/// Ranks   called by the controller; several worlds may run at once.
class Launcher {
 public:
  using Body = std::function<void(Rank&)>;
  virtual ~Launcher() = default;
  [[nodiscard]] virtual std::string_view name() const noexcept = 0;
  /// Whether ranks see shared memory that the controller made before the launch, and the
  /// controller what they wrote there.
  [[nodiscard]] virtual bool shares_memory() const noexcept = 0;
  /// The processes that judge together with this one; null: this process judges alone.
  [[nodiscard]] virtual Peers* peers() noexcept { return nullptr; }
  /// Every rank runs `body`.
  [[nodiscard]] virtual std::unique_ptr<RunningWorld> launch(WorldOptions options, Body body) = 0;
};

/// The sum of all processes that judge together: how often something happened on any rank.
[[nodiscard]] inline std::int64_t sum_over_peers(Launcher& launcher, std::int64_t own) {
  Peers* const peers = launcher.peers();
  return peers == nullptr ? own : peers->sum(own);
}

/// Whether worlds of one rank are forked from this process.
[[nodiscard]] inline bool forks_ranks_here(Launcher& launcher) {
  const Peers* const peers = launcher.peers();
  return peers == nullptr || peers->hosts().is_first(peers->index());
}

}  // namespace isoshard
