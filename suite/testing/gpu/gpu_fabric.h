// SPDX-License-Identifier: Apache-2.0
/// The wires of the GPUs that tests stand in for: rings in memory that forked ranks share.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace isoshard {

/// The wires between the GPUs of the ranks: made before they are forked.
class GpuFabric {
 public:
  static constexpr int kMaxRanks = 8;
  explicit GpuFabric(int num_ranks);
  ~GpuFabric();
  GpuFabric(const GpuFabric&) = delete;
  GpuFabric& operator=(const GpuFabric&) = delete;
  [[nodiscard]] int num_ranks() const noexcept { return num_ranks_; }

  [[nodiscard]] std::uint64_t new_id();
  /// How many ids there are: communicators that ranks of any process have made.
  [[nodiscard]] std::uint64_t num_ids() const;
  /// Rank `rank` of a communicator is the process `process`.
  void arrive(std::uint64_t id, int rank, int process);
  [[nodiscard]] int num_arrived(std::uint64_t id) const;
  [[nodiscard]] int process_of(std::uint64_t id, int rank) const;

  /// One frame of a message, if there is room for it.
  struct Frame {
    std::uint64_t comm = 0;
    std::uint64_t message_bytes = 0;
    std::uint64_t bytes = 0;  ///< of this frame
  };
  static constexpr std::size_t kFrameBytes = std::size_t{64} << 10;
  [[nodiscard]] bool write(int from, int to, const Frame& frame, const std::byte* data);
  [[nodiscard]] bool read(int from, int to, Frame& frame, std::vector<std::byte>& data);

 private:
  struct Ring;
  struct Comm;
  struct Shared;
  [[nodiscard]] Ring& ring(int from, int to) const;

  int num_ranks_;
  std::size_t bytes_;
  Shared* shared_;
};

}  // namespace isoshard
