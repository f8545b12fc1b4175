// SPDX-License-Identifier: Apache-2.0
/// Non-blocking sockets behind poll().
#include "core/comm/tcp/tcp_socket.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "core/base/error.h"

namespace isoshard {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// A rank that is there earlier than rank 0 tries again after this.
constexpr milliseconds kRetry{10};

int milliseconds_until(const Deadline& deadline) {
  if (!deadline) return -1;
  const auto left = std::chrono::ceil<milliseconds>(*deadline - steady_clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
}

/// False once the deadline has passed.
bool wait_for(int fd, short events, const Deadline& deadline) {
  pollfd entry{fd, events, 0};
  for (;;) {
    const int ready = ::poll(&entry, 1, milliseconds_until(deadline));
    if (ready > 0) return true;
    if (ready == 0 && deadline && steady_clock::now() >= *deadline) return false;
    if (ready < 0 && errno != EINTR)
      throw InfrastructureError(fmt::format("poll failed: {}", std::strerror(errno)));
  }
}

void prepare(int fd) {
  const int yes = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(const std::string& address, int port, bool listens) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = listens ? AI_PASSIVE : 0;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(address.empty() ? nullptr : address.c_str(),
                                 std::to_string(port).c_str(), &hints, &found);
  if (code != 0) {
    throw InfrastructureError(fmt::format("the address {} cannot be resolved: {}; set MASTER_ADDR",
                                          address, ::gai_strerror(code)));
  }
  return {found, &::freeaddrinfo};
}

}  // namespace

void Socket::close() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Socket listen_at(const std::string& address, int port) {
  int failure = 0;
  const Addresses found = resolve(address, port, true);
  for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
    Socket made(::socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int yes = 1;
    ::setsockopt(made.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (made.is_open() && ::bind(made.fd(), each->ai_addr, each->ai_addrlen) == 0 &&
        ::listen(made.fd(), SOMAXCONN) == 0) {
      prepare(made.fd());
      return made;
    }
    failure = errno;
  }
  throw InfrastructureError(
      fmt::format("rank 0 must be able to listen at port {}, got: {}; set another MASTER_PORT",
                  port, std::strerror(failure)));
}

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

Socket connect_to(const std::string& address, int port, const Deadline& deadline) {
  const Addresses found = resolve(address, port, false);
  int failure = 0;
  for (;;) {
    for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
      Socket made(::socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (!made.is_open()) continue;
      prepare(made.fd());
      if (::connect(made.fd(), each->ai_addr, each->ai_addrlen) != 0) {
        failure = errno;
        if (errno != EINPROGRESS || !wait_for(made.fd(), POLLOUT, deadline)) continue;
        socklen_t size = sizeof failure;
        ::getsockopt(made.fd(), SOL_SOCKET, SO_ERROR, &failure, &size);
        if (failure != 0) continue;
      }
      return made;
    }
    if (deadline && steady_clock::now() >= *deadline) {
      throw TimeoutError(
          fmt::format("deadline passed: nobody listens at {} port {} ({}); start rank 0 there, or "
                      "set MASTER_ADDR and MASTER_PORT",
                      address, port, std::strerror(failure)));
    }
    ::poll(nullptr, 0, static_cast<int>(kRetry.count()));
  }
}

std::pair<Socket, std::string> accept_from(int fd, const Deadline& deadline) {
  for (;;) {
    if (!wait_for(fd, POLLIN, deadline)) return {};
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    Socket made(::accept4(fd, reinterpret_cast<sockaddr*>(&address), &size, SOCK_CLOEXEC));
    if (!made.is_open()) continue;  // it has gone again
    prepare(made.fd());
    std::array<char, NI_MAXHOST> text{};
    ::getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, text.data(), text.size(),
                  nullptr, 0, NI_NUMERICHOST);
    return {std::move(made), text.data()};
  }
}

bool send_all(int fd, const void* data, std::size_t bytes, const Deadline& deadline) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, from, bytes, MSG_NOSIGNAL);
    if (sent > 0) {
      from += sent;
      bytes -= static_cast<std::size_t>(sent);
    } else if (errno != EAGAIN && errno != EINTR) {
      return false;
    } else if (!wait_for(fd, POLLOUT, deadline)) {
      return false;
    }
  }
  return true;
}

bool receive_all(int fd, void* data, std::size_t bytes, const Deadline& deadline) {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(fd, to, bytes, 0);
    if (got > 0) {
      to += got;
      bytes -= static_cast<std::size_t>(got);
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      return false;
    } else if (!wait_for(fd, POLLIN, deadline)) {
      return false;
    }
  }
  return true;
}

}  // namespace isoshard
