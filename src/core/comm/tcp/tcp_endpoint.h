// SPDX-License-Identifier: Apache-2.0
/// Worlds of the processes of one job, whose packets go over its TCP connections.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/comm/control/control_endpoint.h"
#include "core/comm/tcp/tcp_mesh.h"

namespace isoshard {

/// The processes of a job, and the packets of all their worlds.
///
/// Ranks   one per process; local, one thread at a time.
class TcpJob {
 public:
  /// Ranks    collective over the job.
  /// Errors   as TcpMesh.
  explicit TcpJob(const Rendezvous& rendezvous) : mesh_(rendezvous) {}

  [[nodiscard]] TcpMesh& mesh() noexcept { return mesh_; }
  /// The number of the next world, equal on all processes, which make them in one order.
  [[nodiscard]] std::uint64_t open_world();
  void close_world(std::uint64_t world) noexcept;
  void post(std::uint64_t world, int to, const std::vector<std::byte>& packet);
  /// Packets of the world that have come since the last call.
  [[nodiscard]] std::deque<std::pair<int, std::vector<std::byte>>> take(std::uint64_t world);

 private:
  struct World {
    std::uint64_t number = 0;
    bool is_open = false;
    std::deque<std::pair<int, std::vector<std::byte>>> inbox{};
  };
  [[nodiscard]] World& world_of(std::uint64_t number);

  TcpMesh mesh_;
  std::uint64_t num_worlds_ = 0;
  std::deque<World> worlds_;  ///< open, or not made here yet
};

/// What the process that started ranks on its own host shares with them. Lives in zeroed memory.
struct SharedAbort {
  std::atomic<std::uint32_t> is_aborted;  ///< 1: the reason is there
  char reason[2048];
};

class TcpEndpoint final : public ControlEndpoint {
 public:
  /// `shared_abort` and `shared_journal` may be null.
  /// Ranks   collective over the job.
  TcpEndpoint(std::shared_ptr<TcpJob> job, ReductionOrder order,
              const SharedAbort* shared_abort = nullptr, std::byte* shared_journal = nullptr);
  /// Says goodbye, unless an exception is what ends this rank.
  ~TcpEndpoint() override;

  void post(int world_rank, const Bytes& packet) override;
  /// Makes every lane of the journal exact, and returns the largest `word`.
  /// Ranks    collective over the world, also after an abort.
  /// Errors   CommError if a process is gone.
  std::uint64_t gather_journals(std::uint64_t word);

 protected:
  void take_all_packets() override;
  void flush() override;
  void pause(bool moves_data) noexcept override;
  void end_in_abort() noexcept override;
  [[nodiscard]] std::string why_gone(const RankSet& ranks, bool moves_data) override;

 private:
  std::shared_ptr<TcpJob> job_;
  std::uint64_t world_;
  const SharedAbort* shared_abort_;
  RankSet left_;  ///< ranks that said goodbye
};

}  // namespace isoshard
