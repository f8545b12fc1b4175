// SPDX-License-Identifier: Apache-2.0
/// Packets between processes over TCP: whole, in order, however much waits to be sent.
#include "core/comm/tcp/tcp_mesh.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace isoshard {
namespace {

using namespace std::chrono_literals;

// Sizes around that of a length, and packets above what sockets hold.
std::vector<std::vector<std::byte>> packets() {
  std::vector<std::vector<std::byte>> all;
  for (const std::size_t size :
       {0U, 1U, 7U, 8U, 9U, 65'537U, 3'000'001U, 5U, 8'000'000U, 0U, 17U}) {
    std::vector<std::byte> packet(size);
    for (std::size_t i = 0; i < size; ++i)
      packet[i] = static_cast<std::byte>((i * 31 + (i >> 8U) * 7 + all.size()) & 0xffU);
    all.push_back(std::move(packet));
  }
  return all;
}

// Nobody reads until all is posted, so most of it is sent in parts, from where the last one ended.
TEST(TcpMesh, SendsWholePacketsInOrderWhereSocketsAreFull) {
  const LoopbackListener listener;
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  const auto meeting = [&](int rank) {
    return Rendezvous{.rank = rank,
                      .size = 2,
                      .port = listener.port(),
                      .listening_socket = rank == 0 ? listener.socket() : -1,
                      .job = 7,
                      .deadline = deadline};
  };
  std::unique_ptr<TcpMesh> sender;
  std::thread other([&] { sender = std::make_unique<TcpMesh>(meeting(1)); });
  TcpMesh receiver(meeting(0));
  other.join();
  const std::vector<std::vector<std::byte>> sent = packets();
  for (const auto& packet : sent)
    sender->post(0, std::make_shared<const std::vector<std::byte>>(packet));

  std::vector<std::vector<std::byte>> received;
  while (received.size() < sent.size() && std::chrono::steady_clock::now() < deadline) {
    sender->flush();
    receiver.wait(1ms);
    receiver.poll([&](int from, std::span<const std::byte> packet) {
      EXPECT_EQ(from, 1);
      received.emplace_back(packet.begin(), packet.end());
    });
  }

  EXPECT_TRUE(received == sent);
}

TEST(TcpMesh, SaysWhoIsGone) {
  const LoopbackListener listener;
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  std::unique_ptr<TcpMesh> leaving;
  std::thread other([&] {
    leaving = std::make_unique<TcpMesh>(
        Rendezvous{.rank = 1, .size = 2, .port = listener.port(), .job = 7, .deadline = deadline});
  });
  TcpMesh staying({.rank = 0,
                   .size = 2,
                   .port = listener.port(),
                   .listening_socket = listener.socket(),
                   .job = 7,
                   .deadline = deadline});
  other.join();
  const auto ignore = [](int, std::span<const std::byte>) {};
  staying.poll(ignore);
  EXPECT_FALSE(staying.is_gone(1));

  leaving.reset();
  while (!staying.is_gone(1) && std::chrono::steady_clock::now() < deadline) {
    staying.wait(1ms);
    errno = EINTR;  // of a call before; a connection that ended says nothing by errno
    staying.poll(ignore);
  }

  EXPECT_TRUE(staying.is_gone(1));
}

}  // namespace
}  // namespace isoshard
