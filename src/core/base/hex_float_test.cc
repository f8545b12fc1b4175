// SPDX-License-Identifier: Apache-2.0
// Hex floats against the output of Python's float.hex().
#include "core/base/hex_float.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/philox.h"

namespace isoshard {
namespace {

TEST(HexFloat, WritesWhatPythonWrites) {
  const std::vector<std::pair<double, std::string>> cases{
      {8.4321, "0x1.0dd3c36113405p+3"},
      {1.0, "0x1.0000000000000p+0"},
      {-0.1, "-0x1.999999999999ap-4"},
      {0.0, "0x0.0p+0"},
      {-0.0, "-0x0.0p+0"},
      {5e-324, "0x0.0000000000001p-1022"},
      {2.2250738585072014e-308, "0x1.0000000000000p-1022"},
      {1.7976931348623157e308, "0x1.fffffffffffffp+1023"},
      {std::numeric_limits<double>::infinity(), "inf"},
      {-std::numeric_limits<double>::infinity(), "-inf"},
      {std::numeric_limits<double>::quiet_NaN(), "nan"}};
  for (const auto& [value, text] : cases) EXPECT_EQ(to_hex(value), text);
  EXPECT_EQ(to_hex(0.1F), "0x1.99999a0000000p-4");
}

TEST(HexFloat, EveryDoubleComesBackBitForBit) {
  for (std::uint64_t i = 0; i < 100000; ++i) {
    const auto value = std::bit_cast<double>(random_bits(7, "hex", i));
    if (std::isnan(value)) continue;

    const std::optional<double> back = parse_hex(to_hex(value));

    ASSERT_TRUE(back.has_value()) << to_hex(value);
    ASSERT_EQ(std::bit_cast<std::uint64_t>(*back), std::bit_cast<std::uint64_t>(value))
        << to_hex(value);
  }
}

TEST(HexFloat, ReadsShortAndSpecialForms) {
  EXPECT_EQ(parse_hex("0x1p+0"), 1.0);
  EXPECT_EQ(parse_hex("0X1.8P-1"), 0.75);
  EXPECT_EQ(parse_hex("-inf"), -std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(parse_hex("nan").value()));
  EXPECT_TRUE(std::signbit(parse_hex("-0x0.0p+0").value()));
}

TEST(HexFloat, RefusesEverythingElse) {
  for (const char* text : {"",
                           "1.0",
                           "0x",
                           "0x1",
                           "0x1.",
                           "0x1.p+0",
                           "0x2.0p+0",
                           "0x1.0p0",
                           "0x1.0p+",
                           "0x1.00000000000000p+0",
                           "0x1.0p+0 ",
                           " 0x1.0p+0",
                           "+0x1.0p+0",
                           "--0x1.0p+0",
                           "0x1.0p+1024",
                           "0x1.0p+99999",
                           "0x1.0p+999999999999",
                           "0x1.0p-1075",
                           "0x1.8p-1074",
                           "Inf",
                           "-nan",
                           "0x1.gp+0",
                           "1x1.0p+0",
                           "-",
                           "0x1.0p+0x",
                           "infinity"}) {
    EXPECT_EQ(parse_hex(text), std::nullopt) << "'" << text << "'";
  }
}

}  // namespace
}  // namespace isoshard
