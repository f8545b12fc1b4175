// SPDX-License-Identifier: Apache-2.0
/// Every allocation of a rank fails once (row 25 of docs/internals/failures.md): a report that
/// names the rank, and never a hang or a pass.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "harness/testing/run_world.h"
#include "suite/testing/world_probes.h"

namespace {

// Allocations until one fails; 0: none does.
std::atomic<long> allocations_to_go{0};

void* counted(std::size_t size) {
  if (allocations_to_go.load(std::memory_order_relaxed) > 0 && --allocations_to_go == 0)
    throw std::bad_alloc();
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// In the whole program, LibTorch's libraries included.
void* operator new(std::size_t size) {
  return counted(size);
}
void* operator new[](std::size_t size) {
  return counted(size);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace isoshard {
namespace {

using namespace std::chrono_literals;

// What a rank of a conformance test does: tensors with gradients, collectives, a group, a result.
void ordinary_body(Rank& rank) {
  const at::Tensor weight = at::ones({4, 4}).requires_grad_();
  at::matmul(at::ones({2, 4}), weight).sum().backward();
  const std::unique_ptr<Communicator> group = rank.comm().split(0, rank.rank());
  summed(rank, weight.grad().sum().item<double>());
  rank.set_phase("result");
  detail::post_value(rank, std::vector<double>{summed(rank, 1)});
}

TEST(AllocationFailure, OfEveryAllocationIsToldByItsRank) {
  constexpr auto kDeadline = 60'000ms;
  int failed = 0;
  for (long n = 1;; ++n) {
    ASSERT_LT(n, 5000) << "the body does not end";
    const auto start = std::chrono::steady_clock::now();
    const WorldReport report =
        run_world_report({.size = 2, .name = "allocation", .deadline = kDeadline}, [&](Rank& rank) {
          if (rank.rank() == 1) allocations_to_go = n;
          ordinary_body(rank);
          const bool is_unused = allocations_to_go > 0;
          allocations_to_go = 0;
          EXPECT_FALSE(rank.rank() == 1 && is_unused) << "all allocations were made";
        });

    ASSERT_LT(std::chrono::steady_clock::now() - start, kDeadline / 2) << "allocation " << n;
    if (report.ok()) {  // whoever asked did without
      for (const RankReport& rank : report.ranks)
        ASSERT_EQ(detail::value_of<std::vector<double>>(rank.result), std::vector<double>{2});
      continue;
    }
    if (report.ranks[1].end == RankEnd::kReturned) break;  // n is beyond the last one
    ++failed;
    ASSERT_EQ(report.culprit, 1) << "allocation " << n << ": " << report.describe();
    ASSERT_THAT(report.cause, testing::HasSubstr("rank 1")) << "allocation " << n;
  }
  EXPECT_GT(failed, 20);
}

}  // namespace
}  // namespace isoshard
