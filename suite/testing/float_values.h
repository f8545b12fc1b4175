// SPDX-License-Identifier: Apache-2.0
/// Ordinary floats of every floating dtype for tests of reductions: inputs whose sums depend on
/// order and rounding.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/float_bits.h"
#include "core/comm/communicator.h"

namespace isoshard {

inline constexpr std::int64_t kCount = 300'007;  // over two windows in fp32, and odd

// A dtype as the test sees it: its bits, its accumulator, and the conversions between them.
struct Fp64 {
  using Bits = double;
  static constexpr Dtype kDtype = Dtype::kFloat64;
  static double widen(double bits) { return bits; }
  static double narrow(double value) { return value; }
};
struct Fp32 {
  using Bits = float;
  static constexpr Dtype kDtype = Dtype::kFloat32;
  static float widen(float bits) { return bits; }
  static float narrow(float value) { return value; }
};
struct Bf16 {
  using Bits = std::uint16_t;
  static constexpr Dtype kDtype = Dtype::kBFloat16;
  static float widen(std::uint16_t bits) { return bf16_to_float(bits); }
  static std::uint16_t narrow(float value) { return float_to_bf16(value); }
};
struct Fp16 {
  using Bits = std::uint16_t;
  static constexpr Dtype kDtype = Dtype::kFloat16;
  static float widen(std::uint16_t bits) { return fp16_to_float(bits); }
  static std::uint16_t narrow(float value) { return float_to_fp16(value); }
};

template <class T>
using Values = std::vector<typename T::Bits>;

/// Normal values; in every fourth element ranks 0 and 2 hold large values that cancel, so that what
/// is added between them and what after them differs in every dtype.
template <class T>
Values<T> inputs_of(int rank, std::int64_t count = kCount) {
  std::mt19937_64 engine(static_cast<unsigned>(rank) + 100);
  std::normal_distribution<double> normal;
  Values<T> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    double value = normal(engine);
    if (i % 4 == 0) value = rank == 0 ? 0x1p14 : rank == 2 ? -0x1p14 : value * 0x1p-10;
    values[i] = T::narrow(static_cast<decltype(T::widen({}))>(value));
  }
  return values;
}

template <class T>
Buffer buffer_of(Values<T>& values, std::size_t begin = 0,
                 std::size_t count = static_cast<std::size_t>(kCount)) {
  return {reinterpret_cast<std::byte*>(values.data() + begin), static_cast<std::int64_t>(count),
          T::kDtype};
}

template <class T>
std::int64_t first_different_bit_pattern(const Values<T>& reference, const Values<T>& actual) {
  if (reference.size() != actual.size()) return 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    if (std::memcmp(&reference[i], &actual[i], sizeof(reference[i])) != 0)
      return static_cast<std::int64_t>(i);
  }
  return -1;
}

template <class Body>
void with_float_dtype(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::kFloat64:
      return body.template operator()<Fp64>();
    case Dtype::kFloat32:
      return body.template operator()<Fp32>();
    case Dtype::kBFloat16:
      return body.template operator()<Bf16>();
    case Dtype::kFloat16:
      return body.template operator()<Fp16>();
    default:
      FAIL() << "no float: " << name_of(dtype);
  }
}

}  // namespace isoshard
