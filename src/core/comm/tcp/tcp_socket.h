// SPDX-License-Identifier: Apache-2.0
/// Sockets of TCP as the rendezvous uses them: with a deadline, and errors in words.
#pragma once
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

namespace isoshard {

using Deadline = std::optional<std::chrono::steady_clock::time_point>;

/// A descriptor that closes itself.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) noexcept : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() { close(); }
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool is_open() const noexcept { return fd_ >= 0; }
  void close() noexcept;
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

/// Listens at a port of the address ("" : of every one); port 0: a free one.
/// Errors   InfrastructureError that says what is wrong with the port.
[[nodiscard]] Socket listen_at(const std::string& address, int port);
/// The port that a socket listens at.
[[nodiscard]] int port_of(int fd);
/// Tries until somebody listens there.
/// Errors   InfrastructureError for an address that there is none of; TimeoutError.
[[nodiscard]] Socket connect_to(const std::string& address, int port, const Deadline& deadline);
/// The next that connects, and from which address; none once the deadline has passed.
[[nodiscard]] std::pair<Socket, std::string> accept_from(int fd, const Deadline& deadline);
/// All bytes, or false where the other side closes or the deadline passes.
[[nodiscard]] bool send_all(int fd, const void* data, std::size_t bytes, const Deadline& deadline);
[[nodiscard]] bool receive_all(int fd, void* data, std::size_t bytes, const Deadline& deadline);

}  // namespace isoshard
