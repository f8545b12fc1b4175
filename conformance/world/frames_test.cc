// SPDX-License-Identifier: Apache-2.0
/// The result channel's parser: any cut of the stream gives the same frames, malformed headers are
/// refused before memory is taken.
#include "harness/world/forked/frames.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "harness/world/forked/captured_output.h"
#include "harness/world/forked/unique_fd.h"

namespace isoshard {
namespace {

std::vector<std::byte> header_of(std::uint32_t type, std::uint32_t zero, std::uint64_t length) {
  std::vector<std::byte> bytes(16);
  std::memcpy(bytes.data(), &type, 4);
  std::memcpy(bytes.data() + 4, &zero, 4);
  std::memcpy(bytes.data() + 8, &length, 8);
  return bytes;
}

TEST(Frames, AnyCutOfTheStreamGivesTheSameFrames) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  const UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  send_frame(writer.get(), FrameType::kResultPart, std::string_view("some bytes"));
  send_frame(writer.get(), FrameType::kGoodbye, std::string_view());
  writer.reset();
  std::vector<std::byte> stream(1024);
  stream.resize(static_cast<std::size_t>(::read(reader.get(), stream.data(), stream.size())));

  ASSERT_EQ(stream.size(), 16U + 10U + 16U);
  for (std::size_t step = 1; step <= stream.size(); ++step) {
    std::string seen;
    FrameParser parser([&](FrameType type, std::span<const std::byte> payload) {
      seen += std::to_string(static_cast<int>(type)) + ":" +
              std::string(reinterpret_cast<const char*>(payload.data()), payload.size()) + ";";
    });
    for (std::size_t at = 0; at < stream.size(); at += step)
      parser.feed(std::span(stream).subspan(at, std::min(step, stream.size() - at)));
    EXPECT_EQ(seen, "1:some bytes;5:;") << "pieces of " << step;
    EXPECT_NO_THROW(parser.finish());
  }
}

TEST(Frames, RefusesMalformedHeaders) {
  const auto feed = [](const std::vector<std::byte>& bytes) {
    FrameParser([](FrameType, std::span<const std::byte>) {}).feed(bytes);
  };

  EXPECT_THROW(feed(header_of(1, 0, std::uint64_t{1} << 63)), ProtocolError);
  EXPECT_THROW(feed(header_of(1, 0, kMaxFramePayload + 1)), ProtocolError);
  EXPECT_THROW(feed(header_of(0, 0, 1)), ProtocolError);
  EXPECT_THROW(feed(header_of(7, 0, 1)), ProtocolError);
  EXPECT_THROW(feed(header_of(1, 1, 1)), ProtocolError);
  EXPECT_NO_THROW(feed(header_of(1, 0, kMaxFramePayload)));
}

TEST(Frames, ACutFrameIsAnError) {
  FrameParser parser(
      [](FrameType, std::span<const std::byte>) { FAIL() << "no frame is complete"; });
  parser.feed(header_of(1, 0, 5));

  EXPECT_THROW(parser.finish(), ProtocolError);
}

TEST(Frames, ShortPayloadsAreErrors) {
  PayloadWriter writer;
  writer.number(7).text("abc");
  PayloadReader good(writer.bytes());
  PayloadReader cut(writer.bytes().first(18));

  EXPECT_EQ(good.number(), 7U);
  EXPECT_EQ(good.text(), "abc");
  EXPECT_EQ(cut.number(), 7U);
  EXPECT_THROW((void)cut.text(), ProtocolError);
}

TEST(CapturedOutput, KeepsAllOfShortOutput) {
  CapturedOutput output;
  const std::string part(CapturedOutput::kPart, 'a');
  output.append(part);
  output.append(std::string(CapturedOutput::kPart, 'b'));

  EXPECT_EQ(output.text(), part + std::string(CapturedOutput::kPart, 'b'));
}

TEST(CapturedOutput, KeepsHeadAndTailOfLongOutputAndSaysHowMuchIsMissing) {
  CapturedOutput output;
  output.append("head");
  for (int i = 0; i < 1000; ++i) output.append(std::string(1000, 'x'));
  output.append("tail");

  const std::string text = output.text();
  EXPECT_TRUE(text.starts_with("headxxx"));
  EXPECT_TRUE(text.ends_with("xxxtail"));
  EXPECT_NE(text.find("[... " + std::to_string(1'000'008 - 2 * CapturedOutput::kPart) +
                      " bytes left out ...]"),
            std::string::npos);
}

TEST(CapturedOutput, ReportsShowNoControlCharacters) {
  EXPECT_EQ(printable_tail("a\x1b[31mb\n\tc", 100), "a?[31mb\n\tc");
}

}  // namespace
}  // namespace isoshard
