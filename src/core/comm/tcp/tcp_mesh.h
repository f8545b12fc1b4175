// SPDX-License-Identifier: Apache-2.0
/// A TCP connection between each two processes of a job, over which they send packets.
///
/// Words. The *rendezvous* is an address and a port at which rank 0 listens. Every other rank says
/// there who it is and at which port it listens itself; when all have come, each gets the table of
/// all, and connects to the ranks below it.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace isoshard {

struct Rendezvous {
  int rank = 0;
  int size = 1;
  std::string address = "127.0.0.1";
  int port = 0;
  /// Rank 0's socket if it listens already (a fork's parent made it), else -1. Not owned.
  int listening_socket = -1;
  /// A number that all processes of the job have, and no other job at this port.
  std::uint64_t job = 0;
  std::optional<std::chrono::steady_clock::time_point> deadline{};
};

/// A socket that listens at a free port of this host alone, for ranks that will be forked.
class LoopbackListener {
 public:
  /// Errors   InfrastructureError.
  LoopbackListener();
  ~LoopbackListener();
  LoopbackListener(const LoopbackListener&) = delete;
  LoopbackListener& operator=(const LoopbackListener&) = delete;
  [[nodiscard]] int socket() const noexcept { return socket_; }
  [[nodiscard]] int port() const noexcept { return port_; }

 private:
  int socket_ = -1;
  int port_ = 0;
};

/// Guarantees   packets of one rank arrive whole, and in the order in which it sent them.
/// Ranks        local but for the constructor; one thread at a time.
class TcpMesh {
 public:
  using Bytes = std::shared_ptr<const std::vector<std::byte>>;
  /// Returns when all ranks have come.
  /// Ranks    collective over the job.
  /// Errors   InfrastructureError that names the address, or a port in use; TimeoutError that names
  ///          the ranks which have not come by the deadline; UsageError where processes of another
  ///          size, a rank twice, or another job came.
  explicit TcpMesh(const Rendezvous& rendezvous);
  ~TcpMesh();
  TcpMesh(const TcpMesh&) = delete;
  TcpMesh& operator=(const TcpMesh&) = delete;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }

  /// Does not wait. Nothing is sent to a rank that is gone.
  void post(int to, const Bytes& packet);
  /// Moves on what was posted, and calls `take` for each packet that has come. Does not wait.
  void poll(const std::function<void(int from, std::span<const std::byte>)>& take);
  void flush();
  /// Returns when something has come, or after the time.
  void wait(std::chrono::microseconds time) noexcept;
  /// Whether the rank's connection is closed: its process has ended, or its host is gone.
  [[nodiscard]] bool is_gone(int rank) const noexcept;
  /// Sends all that was posted, for a process that ends.
  void drain() noexcept;

 private:
  struct Peer;
  void write_to(Peer& peer);
  void read_from(int rank, Peer& peer,
                 const std::function<void(int from, std::span<const std::byte>)>& take);

  int rank_;
  int size_;
  std::vector<std::unique_ptr<Peer>> peers_;  ///< by rank; none for this one
};

}  // namespace isoshard
