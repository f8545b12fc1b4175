// SPDX-License-Identifier: Apache-2.0
// Elements of every dtype as doubles, and doubles rounded to every dtype.
#include "harness/trace/numbers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;

HostTensor tensor_of_bytes(const std::vector<std::byte>& bytes, Dtype dtype) {
  return {dtype, {static_cast<std::int64_t>(bytes.size() / size_of(dtype))}, bytes};
}

TEST(Numbers, WhatADtypeHoldsComesBack) {
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16,
                            Dtype::kInt64, Dtype::kInt32, Dtype::kInt16, Dtype::kInt8}) {
    const std::vector<std::byte> bytes = bytes_of(std::vector<double>{0, 1, -2, 96}, dtype);
    EXPECT_THAT(numbers_of(tensor_of_bytes(bytes, dtype)), ElementsAre(0, 1, -2, 96))
        << name_of(dtype);
  }
  const std::vector<std::byte> flags = bytes_of(std::vector<double>{0, 2}, Dtype::kBool);
  EXPECT_THAT(numbers_of(tensor_of_bytes(flags, Dtype::kBool)), ElementsAre(0, 1));
}

TEST(Numbers, RoundingIsToNearest) {
  const auto rounded = [](double number, Dtype dtype) {
    return number_of(tensor_of_bytes(bytes_of(std::vector{number}, dtype), dtype));
  };

  EXPECT_EQ(rounded(1 + 0x1p-24, Dtype::kFloat32), 1);
  EXPECT_EQ(rounded(1 + 0x1.8p-24, Dtype::kFloat32), 1 + 0x1p-23);
  EXPECT_EQ(rounded(1 + 0x1.8p-8, Dtype::kBFloat16), 1 + 0x1p-7);
  EXPECT_EQ(rounded(65520, Dtype::kFloat16), INFINITY);
  EXPECT_EQ(rounded(2.75, Dtype::kInt32), 2);
}

TEST(Numbers, AScalarIsOneNumber) {
  const std::vector<std::byte> two = bytes_of(std::vector<double>{1, 2}, Dtype::kFloat32);
  EXPECT_THROW((void)number_of(tensor_of_bytes(two, Dtype::kFloat32)), VacuousError);
}

}  // namespace
}  // namespace isoshard
