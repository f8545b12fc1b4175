// SPDX-License-Identifier: Apache-2.0
/// The messages on a rank's result channel: a 16-byte header (type, zero, length), then `length`
/// bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/error.h"

namespace isoshard {

enum class FrameType : std::uint32_t {
  kResultPart = 1,  ///< a piece of the rank's result
  kFailure = 2,     ///< a ForwardedFailure
  kCommError = 3,   ///< the body ended with a CommError; what()
  kException = 4,   ///< the body ended with any other exception; its type and what()
  kGoodbye = 5,     ///< the body is done; only failures in threads that outlive it follow
  kLeak = 6,        ///< processes that the body left running, in words; a goodbye follows
  kFileError = 8,   ///< the body ended with a FileError, or an input changed while it ran; what()
};

inline constexpr std::uint64_t kMaxFramePayload = 1U << 20;
inline constexpr std::uint64_t kMaxResultBytes = 1U << 30;

/// A channel carried bytes that no rank sends.
class ProtocolError : public InfrastructureError {
 public:
  using InfrastructureError::InfrastructureError;
};

/// Writes one frame; blocks until the other side has taken it. Payloads beyond kMaxFramePayload are
/// cut.
/// Errors   InfrastructureError if the channel is broken.
void send_frame(int fd, FrameType type, std::span<const std::byte> payload);
void send_frame(int fd, FrameType type, std::string_view text);

/// Assembles frames from the pieces that arrive.
///
/// Guarantees   type and length are checked before memory is reserved; never holds more than one
///              frame.
/// Errors       feed() throws ProtocolError that names type and length; finish() does if a frame is
///              cut off.
///
///     FrameParser parser([&](FrameType type, std::span<const std::byte> payload) { ... });
///     parser.feed(bytes);
class FrameParser {
 public:
  using Handler = std::function<void(FrameType type, std::span<const std::byte> payload)>;
  explicit FrameParser(Handler handler) : handler_(std::move(handler)) {}
  void feed(std::span<const std::byte> bytes);
  void finish() const;

 private:
  Handler handler_;
  std::vector<std::byte> pending_;  ///< header and payload of the frame that is not complete yet
};

/// Numbers and texts one after the other, for payloads. Both ends run on one machine: native byte
/// order.
class PayloadWriter {
 public:
  PayloadWriter& number(std::uint64_t value);
  PayloadWriter& text(std::string_view value);
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

/// Errors   ProtocolError when the payload is too short for the value that is read.
class PayloadReader {
 public:
  explicit PayloadReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  [[nodiscard]] std::uint64_t number();
  [[nodiscard]] std::string text();

 private:
  std::span<const std::byte> take(std::uint64_t count);
  std::span<const std::byte> bytes_;
};

}  // namespace isoshard
