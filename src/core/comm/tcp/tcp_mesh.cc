// SPDX-License-Identifier: Apache-2.0
/// The rendezvous, and packets as a length and their bytes.
#include "core/comm/tcp/tcp_mesh.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/base/error.h"
#include "core/comm/tcp/tcp_socket.h"

namespace isoshard {
namespace {

constexpr std::uint64_t kMagic = 0x4449522d4f534900;  // "\0ISO-RID": no other protocol begins so
constexpr std::uint64_t kMaxPacket = std::uint64_t{1} << 30;
constexpr std::size_t kReadAtOnce = std::size_t{64} << 10;

/// The first words of a process to another one.
struct Hello {
  std::uint64_t magic = kMagic;
  std::uint64_t job = 0;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::int32_t port = 0;
  std::int32_t is_welcome = 1;  ///< of rank 0's answer
};

struct Place {
  std::array<char, 64> address{};
  std::int32_t port = 0;
};

std::vector<int> missing(const std::vector<Socket>& sockets, int own) {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(sockets.size()); ++rank) {
    if (rank != own && !sockets[static_cast<std::size_t>(rank)].is_open()) ranks.push_back(rank);
  }
  return ranks;
}

[[noreturn]] void throw_missing(const std::vector<int>& ranks, const Rendezvous& meeting) {
  throw TimeoutError(fmt::format(
      "deadline passed: {} {} of {} {} not come to the rendezvous at {} port {}; start all ranks "
      "with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
      ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "), meeting.size,
      ranks.size() == 1 ? "has" : "have", meeting.address, meeting.port));
}

/// Takes who comes, until every rank from `first` on but this one has.
class Reception {
 public:
  Reception(const Rendezvous& meeting, std::vector<Socket>& sockets)
      : meeting_(meeting), sockets_(sockets) {}

  void take_all(int listening, int first, std::vector<Place>* places) {
    const auto is_complete = [&] {
      const std::vector<int> absent = missing(sockets_, meeting_.rank);
      return std::ranges::none_of(absent, [&](int rank) { return rank >= first; });
    };
    while (!is_complete()) {
      auto [socket, address] = accept_from(listening, meeting_.deadline);
      if (!socket.is_open()) throw_missing(missing(sockets_, meeting_.rank), meeting_);
      Hello hello;
      // something else that knocks at the port is sent away
      if (!receive_all(socket.fd(), &hello, sizeof hello, meeting_.deadline) ||
          hello.magic != kMagic)
        continue;
      const std::string problem = problem_of(hello, first);
      if (!problem.empty()) refuse(socket, problem);
      if (places != nullptr) {
        Place& place = (*places)[static_cast<std::size_t>(hello.rank)];
        std::copy_n(address.begin(), std::min(address.size(), place.address.size() - 1),
                    place.address.begin());
        place.port = hello.port;
      }
      sockets_[static_cast<std::size_t>(hello.rank)] = std::move(socket);
    }
  }

 private:
  [[nodiscard]] std::string problem_of(const Hello& hello, int first) const {
    if (hello.job != meeting_.job) return "processes of two jobs came to one MASTER_PORT";
    if (hello.size != meeting_.size) {
      return fmt::format("all ranks must have the same WORLD_SIZE, got {} and {}", meeting_.size,
                         hello.size);
    }
    if (hello.rank < first || hello.rank >= meeting_.size || hello.rank == meeting_.rank)
      return fmt::format("a rank must be from {} to {}, got {}", first, meeting_.size - 1,
                         hello.rank);
    if (sockets_[static_cast<std::size_t>(hello.rank)].is_open())
      return fmt::format("rank {} came twice; each process must have a RANK of its own",
                         hello.rank);
    return {};
  }
  [[noreturn]] void refuse(const Socket& socket, const std::string& problem) const {
    const Hello answer{.rank = meeting_.rank, .size = meeting_.size, .is_welcome = 0};
    (void)send_all(socket.fd(), &answer, sizeof answer, meeting_.deadline);
    throw UsageError(problem);
  }

  const Rendezvous& meeting_;
  std::vector<Socket>& sockets_;
};

void say(const Socket& socket, const void* data, std::size_t bytes, const Rendezvous& meeting,
         int to) {
  if (send_all(socket.fd(), data, bytes, meeting.deadline)) return;
  throw InfrastructureError(fmt::format("rank {} ended during the rendezvous at {} port {}", to,
                                        meeting.address, meeting.port));
}

std::vector<Socket> meet_as_first(const Rendezvous& meeting) {
  std::vector<Socket> sockets(static_cast<std::size_t>(meeting.size));
  std::vector<Place> places(sockets.size());
  Socket own;
  if (meeting.listening_socket < 0 && meeting.size > 1) own = listen_at("", meeting.port);
  const int listening = meeting.listening_socket < 0 ? own.fd() : meeting.listening_socket;
  Reception(meeting, sockets).take_all(listening, 1, &places);
  const Hello answer{.job = meeting.job, .rank = 0, .size = meeting.size};
  for (int rank = 1; rank < meeting.size; ++rank) {
    const Socket& socket = sockets[static_cast<std::size_t>(rank)];
    say(socket, &answer, sizeof answer, meeting, rank);
    say(socket, places.data(), places.size() * sizeof(Place), meeting, rank);
  }
  return sockets;
}

std::vector<Socket> meet_as_other(const Rendezvous& meeting) {
  std::vector<Socket> sockets(static_cast<std::size_t>(meeting.size));
  std::vector<Place> places(sockets.size());
  const Socket listening = listen_at("", 0);
  const Hello hello{.job = meeting.job,
                    .rank = meeting.rank,
                    .size = meeting.size,
                    .port = port_of(listening.fd())};
  sockets[0] = connect_to(meeting.address, meeting.port, meeting.deadline);
  say(sockets[0], &hello, sizeof hello, meeting, 0);
  Hello answer{.magic = 0};
  if (!receive_all(sockets[0].fd(), &answer, sizeof answer, meeting.deadline)) {
    throw TimeoutError(fmt::format(
        "rank {} got no answer of rank 0 at {} port {}: not all ranks came in time, or rank 0 "
        "ended; its own error says more",
        meeting.rank, meeting.address, meeting.port));
  }
  if (answer.magic != kMagic || answer.is_welcome == 0) {
    throw UsageError(fmt::format(
        "rank 0 at {} port {} refused rank {} of {}: it must be of the same job and program, with "
        "the same WORLD_SIZE and a RANK of its own",
        meeting.address, meeting.port, meeting.rank, meeting.size));
  }
  if (!receive_all(sockets[0].fd(), places.data(), places.size() * sizeof(Place), meeting.deadline))
    throw InfrastructureError("rank 0 ended during the rendezvous; its own error says more");
  for (int rank = 1; rank < meeting.rank; ++rank) {
    const Place& place = places[static_cast<std::size_t>(rank)];
    Socket& socket = sockets[static_cast<std::size_t>(rank)];
    socket = connect_to(place.address.data(), place.port, meeting.deadline);
    say(socket, &hello, sizeof hello, meeting, rank);
  }
  Reception(meeting, sockets).take_all(listening.fd(), meeting.rank + 1, nullptr);
  return sockets;
}

}  // namespace

LoopbackListener::LoopbackListener() {
  Socket made = listen_at("127.0.0.1", 0);
  port_ = port_of(made.fd());
  socket_ = made.release();
}

LoopbackListener::~LoopbackListener() {
  Socket(socket_).close();
}

struct TcpMesh::Peer {
  Socket socket;
  std::deque<Bytes> outgoing;
  std::size_t sent = 0;  ///< of the first outgoing one, its length included
  std::vector<std::byte> incoming;
  bool is_gone = false;
};

TcpMesh::TcpMesh(const Rendezvous& rendezvous) : rank_(rendezvous.rank), size_(rendezvous.size) {
  auto sockets = rank_ == 0 ? meet_as_first(rendezvous) : meet_as_other(rendezvous);
  for (Socket& socket : sockets) {
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->socket = std::move(socket);
  }
}

TcpMesh::~TcpMesh() = default;

void TcpMesh::post(int to, const Bytes& packet) {
  Peer& peer = *peers_[static_cast<std::size_t>(to)];
  if (peer.is_gone) return;
  peer.outgoing.push_back(packet);
  write_to(peer);
}

void TcpMesh::write_to(Peer& peer) {
  while (!peer.outgoing.empty() && !peer.is_gone) {
    const std::vector<std::byte>& packet = *peer.outgoing.front();
    const std::uint64_t length = packet.size();
    std::array<iovec, 2> parts = {
        iovec{const_cast<std::uint64_t*>(&length), sizeof length},  // NOLINT: it is only read
        iovec{const_cast<std::byte*>(packet.data()), packet.size()}};
    std::size_t skip = peer.sent;
    for (iovec& part : parts) {
      const std::size_t skipped = std::min(skip, part.iov_len);
      part.iov_base = static_cast<std::byte*>(part.iov_base) + skipped;
      part.iov_len -= skipped;
      skip -= skipped;
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t sent = ::sendmsg(peer.socket.fd(), &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      // what it has sent before it went is still read
      if (errno != EAGAIN) peer.outgoing.clear();
      return;
    }
    peer.sent += static_cast<std::size_t>(sent);
    if (peer.sent < sizeof length + packet.size()) continue;
    peer.sent = 0;
    peer.outgoing.pop_front();
  }
}

void TcpMesh::read_from(int rank, Peer& peer,
                        const std::function<void(int from, std::span<const std::byte>)>& take) {
  for (bool is_drained = false; !is_drained && !peer.is_gone;) {
    const std::size_t before = peer.incoming.size();
    peer.incoming.resize(before + kReadAtOnce);
    const ssize_t got = ::recv(peer.socket.fd(), peer.incoming.data() + before, kReadAtOnce, 0);
    peer.incoming.resize(before + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0 && errno == EINTR) continue;
    is_drained = got < static_cast<ssize_t>(kReadAtOnce);
    peer.is_gone = got == 0 || (got < 0 && errno != EAGAIN);
  }
  std::size_t begin = 0;
  for (std::uint64_t length = 0; peer.incoming.size() - begin >= sizeof length;) {
    std::memcpy(&length, peer.incoming.data() + begin, sizeof length);
    if (length > kMaxPacket) {
      throw InfrastructureError(fmt::format(
          "rank {} sent a packet of {} bytes; start the same program on every host", rank, length));
    }
    if (peer.incoming.size() - begin < sizeof length + length) break;
    take(rank, std::span(peer.incoming).subspan(begin + sizeof length, length));
    begin += sizeof length + length;
  }
  peer.incoming.erase(peer.incoming.begin(),
                      peer.incoming.begin() + static_cast<std::ptrdiff_t>(begin));
}

void TcpMesh::poll(const std::function<void(int from, std::span<const std::byte>)>& take) {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) read_from(rank, *peers_[static_cast<std::size_t>(rank)], take);
  }
}

void TcpMesh::flush() {
  for (const auto& peer : peers_) write_to(*peer);
}

void TcpMesh::wait(std::chrono::microseconds time) noexcept {
  std::vector<pollfd> entries;
  for (const auto& peer : peers_) {
    if (!peer->socket.is_open() || peer->is_gone) continue;
    const bool has_more = !peer->outgoing.empty();
    entries.push_back(
        {peer->socket.fd(), static_cast<short>(has_more ? POLLIN | POLLOUT : POLLIN), 0});
  }
  const timespec duration{time.count() / 1'000'000, time.count() % 1'000'000 * 1000};
  ::ppoll(entries.data(), entries.size(), &duration, nullptr);
}

bool TcpMesh::is_gone(int rank) const noexcept {
  return rank != rank_ && peers_[static_cast<std::size_t>(rank)]->is_gone;
}

void TcpMesh::drain() noexcept {
  constexpr std::chrono::seconds kLongest{5};
  const auto until = std::chrono::steady_clock::now() + kLongest;
  for (;;) {
    flush();
    const bool has_more = std::ranges::any_of(
        peers_, [](const auto& peer) { return !peer->outgoing.empty() && !peer->is_gone; });
    if (!has_more || std::chrono::steady_clock::now() >= until) return;
    wait(std::chrono::milliseconds(1));
  }
}

}  // namespace isoshard
