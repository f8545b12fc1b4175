// SPDX-License-Identifier: Apache-2.0
/// Framing on a stream socket.
#include "harness/world/forked/frames.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace isoshard {
namespace {

struct Header {
  std::uint32_t type = 0;
  std::uint32_t zero = 0;
  std::uint64_t length = 0;
};
static_assert(sizeof(Header) == 16);

Header checked_header(const std::byte* bytes) {
  Header header;
  std::memcpy(&header, bytes, sizeof(header));
  const bool is_known = (header.type >= static_cast<std::uint32_t>(FrameType::kResultPart) &&
                         header.type <= static_cast<std::uint32_t>(FrameType::kLeak)) ||
                        header.type == static_cast<std::uint32_t>(FrameType::kFileError);
  if (header.zero != 0 || !is_known) {
    throw ProtocolError(
        fmt::format("protocol: unknown frame type {:#x} (length {})", header.type, header.length));
  }
  if (header.length > kMaxFramePayload) {
    throw ProtocolError(fmt::format("protocol: a frame of type {} claims {} bytes; the limit is {}",
                                    header.type, header.length, kMaxFramePayload));
  }
  return header;
}

}  // namespace

void send_frame(int fd, FrameType type, std::span<const std::byte> payload) {
  Header header{static_cast<std::uint32_t>(type), 0,
                std::min<std::uint64_t>(payload.size(), kMaxFramePayload)};
  std::array<iovec, 2> parts{
      iovec{&header, sizeof(header)},
      iovec{const_cast<std::byte*>(payload.data()), static_cast<std::size_t>(header.length)}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  while (message.msg_iovlen > 0) {
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0)
      throw InfrastructureError(
          fmt::format("the result channel is broken: {}", std::strerror(errno)));
    auto left = static_cast<std::size_t>(sent);
    while (message.msg_iovlen > 0 && left >= message.msg_iov->iov_len) {
      left -= message.msg_iov->iov_len;
      ++message.msg_iov;
      --message.msg_iovlen;
    }
    if (message.msg_iovlen > 0) {
      message.msg_iov->iov_base = static_cast<std::byte*>(message.msg_iov->iov_base) + left;
      message.msg_iov->iov_len -= left;
    }
  }
}

void send_frame(int fd, FrameType type, std::string_view text) {
  send_frame(fd, type, std::as_bytes(std::span(text)));
}

void FrameParser::feed(std::span<const std::byte> bytes) {
  const auto take_until = [&](std::size_t size) {
    const std::size_t count = std::min(bytes.size(), size - pending_.size());
    pending_.insert(pending_.end(), bytes.begin(),
                    bytes.begin() + static_cast<std::ptrdiff_t>(count));
    bytes = bytes.subspan(count);
    return pending_.size() == size;
  };
  while (!bytes.empty()) {
    if (pending_.size() < sizeof(Header) && !take_until(sizeof(Header))) return;
    const Header header = checked_header(pending_.data());
    if (!take_until(sizeof(Header) + static_cast<std::size_t>(header.length))) return;
    handler_(static_cast<FrameType>(header.type),
             std::span<const std::byte>(pending_).subspan(sizeof(Header)));
    pending_.clear();
  }
}

void FrameParser::finish() const {
  if (!pending_.empty())
    throw ProtocolError(fmt::format(
        "protocol: the channel ended inside a frame, after {} bytes of it", pending_.size()));
}

PayloadWriter& PayloadWriter::number(std::uint64_t value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  return *this;
}

PayloadWriter& PayloadWriter::text(std::string_view value) {
  number(value.size());
  const auto bytes = std::as_bytes(std::span(value));
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  return *this;
}

std::span<const std::byte> PayloadReader::take(std::uint64_t count) {
  if (count > bytes_.size())
    throw ProtocolError(
        fmt::format("protocol: {} bytes wanted of a payload with {} left", count, bytes_.size()));
  const auto taken = bytes_.first(static_cast<std::size_t>(count));
  bytes_ = bytes_.subspan(taken.size());
  return taken;
}

std::uint64_t PayloadReader::number() {
  std::uint64_t value = 0;
  std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
  return value;
}

std::string PayloadReader::text() {
  const auto bytes = take(number());
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace isoshard
