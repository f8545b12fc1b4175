// SPDX-License-Identifier: Apache-2.0
/// The body that kernels run is bit-equal to the reductions of the CPU: every order, reduction and
/// dtype, on random bit patterns.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/base/float_bits.h"
#include "core/comm/buffers.h"
#include "core/comm/nccl/gathered_reduction.h"
#include "core/comm/reduce.h"

namespace isoshard {
namespace {

constexpr std::int64_t kCount = 997;

struct Setting {
  ReductionOrder order;
  Dtype dtype;
};

/// NaN payloads are not promised: NaN is one pattern.
void forget_payloads(Dtype dtype, std::vector<std::byte>& bytes) {
  for (std::size_t at = 0; at < bytes.size(); at += size_of(dtype)) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, bytes.data() + at, size_of(dtype));
    const auto bits16 = static_cast<std::uint16_t>(bits);
    const bool is_nan = dtype == Dtype::kFloat64
                            ? (bits << 1) > (std::uint64_t{0x7ff0000000000000} << 1)
                        : dtype == Dtype::kFloat32  ? (bits & 0x7fffffffU) > 0x7f800000U
                        : dtype == Dtype::kBFloat16 ? bf16_to_float(bits16) != bf16_to_float(bits16)
                        : dtype == Dtype::kFloat16  ? fp16_to_float(bits16) != fp16_to_float(bits16)
                                                    : false;
    if (is_nan) std::memset(bytes.data() + at, 0xff, size_of(dtype));
  }
}

/// Random patterns, in which every other value is an ordinary one.
std::vector<std::byte> random_values(Dtype dtype, std::int64_t count, std::mt19937_64& engine) {
  std::vector<std::byte> bytes(bytes_of(count, dtype));
  for (std::byte& each : bytes) each = static_cast<std::byte>(engine());
  std::normal_distribution<double> ordinary;
  for (std::int64_t i = 0; i < count; i += 2) {
    const double value = ordinary(engine);
    const auto narrow = static_cast<float>(value);
    const std::uint16_t half =
        dtype == Dtype::kBFloat16 ? float_to_bf16(narrow) : float_to_fp16(narrow);
    std::byte* const to = bytes.data() + bytes_of(i, dtype);
    if (dtype == Dtype::kFloat64) std::memcpy(to, &value, sizeof value);
    if (dtype == Dtype::kFloat32) std::memcpy(to, &narrow, sizeof narrow);
    if (dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat16) std::memcpy(to, &half, sizeof half);
  }
  return bytes;
}

class GatheredReductions : public testing::TestWithParam<Setting> {
 protected:
  /// Pieces as NCCL gathers them, and where each begins.
  void gather(int num_sources) {
    gathered_.clear();
    sources_.clear();
    stride_ = bytes_of(kCount + 3, GetParam().dtype);
    for (int source = 0; source < num_sources; ++source) {
      const auto piece = random_values(GetParam().dtype, kCount + 3, engine_);
      gathered_.insert(gathered_.end(), piece.begin(), piece.end());
    }
    for (int source = 0; source < num_sources; ++source)
      sources_.push_back(gathered_.data() + stride_ * static_cast<std::size_t>(source));
  }
  GatheredReduction task(Reduction reduction, std::vector<std::byte>& output) {
    output.assign(bytes_of(kCount, GetParam().dtype), std::byte{0x5a});
    return {.order = GetParam().order,
            .reduction = reduction,
            .dtype = GetParam().dtype,
            .gathered = gathered_.data(),
            .stride_bytes = stride_,
            .num_sources = static_cast<int>(sources_.size()),
            .output = output.data(),
            .count = kCount};
  }
  void expect_equal(std::vector<std::byte> expected, std::vector<std::byte> actual) {
    forget_payloads(GetParam().dtype, expected);
    forget_payloads(GetParam().dtype, actual);
    EXPECT_TRUE(expected == actual);
  }

  std::mt19937_64 engine_{7};
  std::vector<std::byte> gathered_;
  std::vector<const std::byte*> sources_;
  std::size_t stride_ = 0;
};

TEST_P(GatheredReductions, AreBitEqualToThePartsOfAnAllReduce) {
  for (const int num_sources : {1, 2, 3, 4, 5, 6, 7, 8, 13, 16}) {
    gather(num_sources);
    for (const Reduction reduction :
         {Reduction::kSum, Reduction::kAvg, Reduction::kMin, Reduction::kMax}) {
      if (GetParam().dtype == Dtype::kBool && reduction == Reduction::kAvg) continue;
      SCOPED_TRACE(fmt::format("{} of {}", name_of(reduction), num_sources));
      // chunks of the ring begin inside the part, and it inside one
      const PartOfTensor part{.begin = 1234, .count_of_tensor = 1234 + kCount + 571};
      std::vector<std::byte> expected(bytes_of(kCount, GetParam().dtype)), actual;
      reduce_part(GetParam().order, reduction, GetParam().dtype, sources_, part, expected.data(),
                  kCount);

      GatheredReduction own = task(reduction, actual);
      own.begin = part.begin;
      own.chunk = ring_chunk_size(part.count_of_tensor, num_sources);
      reduce_gathered(own);

      expect_equal(expected, actual);
    }
  }
}

TEST_P(GatheredReductions, AreBitEqualToTheBlocksOfAReduceScatter) {
  gather(5);
  for (int last_rank = 0; last_rank < 5; ++last_rank) {
    std::vector<std::byte> expected(bytes_of(kCount, GetParam().dtype)), actual;
    reduce_block_of_rank(GetParam().order, Reduction::kSum, GetParam().dtype, sources_, last_rank,
                         expected.data(), kCount);

    GatheredReduction own = task(Reduction::kSum, actual);
    own.last_rank = last_rank;
    reduce_gathered(own);

    expect_equal(expected, actual);
  }
}

// Kernels write in place over the piece of their own rank.
TEST_P(GatheredReductions, MayWriteOverOneOfThePieces) {
  gather(3);
  std::vector<std::byte> expected;
  const GatheredReduction apart = task(Reduction::kSum, expected);
  reduce_gathered(apart);

  GatheredReduction in_place = apart;
  in_place.output = gathered_.data() + stride_;
  reduce_gathered(in_place);

  const std::byte* const begin = gathered_.data() + stride_;
  expect_equal(expected, {begin, begin + bytes_of(kCount, GetParam().dtype)});
}

// Negative control: patterns that every order adds alike would show nothing.
TEST(GatheredReductionOrders, DifferInSixteenBitSums) {
  std::mt19937_64 engine(3);
  std::vector<std::vector<std::byte>> results;
  const auto gathered = random_values(Dtype::kBFloat16, 7 * kCount, engine);
  for (const ReductionOrder order :
       {ReductionOrder::kOrdered, ReductionOrder::kRing, ReductionOrder::kTree}) {
    auto& output = results.emplace_back(bytes_of(kCount, Dtype::kBFloat16));
    reduce_gathered({.order = order,
                     .dtype = Dtype::kBFloat16,
                     .gathered = gathered.data(),
                     .stride_bytes = bytes_of(kCount, Dtype::kBFloat16),
                     .num_sources = 7,
                     .output = output.data(),
                     .count = kCount});
  }
  EXPECT_NE(results[0], results[1]);
  EXPECT_NE(results[0], results[2]);
  EXPECT_NE(results[1], results[2]);
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const ReductionOrder order :
       {ReductionOrder::kOrdered, ReductionOrder::kRing, ReductionOrder::kTree}) {
    for (int dtype = 0; dtype <= static_cast<int>(Dtype::kBool); ++dtype)
      all.push_back({order, static_cast<Dtype>(dtype)});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Orders, GatheredReductions, testing::ValuesIn(settings()),
                         [](const auto& setting) {
                           return fmt::format("{}_{}", name_of(setting.param.order),
                                              name_of(setting.param.dtype));
                         });

}  // namespace
}  // namespace isoshard
