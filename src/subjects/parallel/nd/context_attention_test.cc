// SPDX-License-Identifier: Apache-2.0
// Attention of split tokens is that of whole sequences, values and gradients.
#include "subjects/parallel/nd/context_attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

constexpr int kRanks = 3;

// [B,N,S,D] with two query heads a kv head, fp64, from a fixed seed.
struct Whole {
  at::Tensor q, k, v, gradient;
};
Whole whole_sequences() {
  at::manual_seed(7);
  const auto made = [](std::int64_t heads) { return at::randn({2, heads, 12, 4}, at::kDouble); };
  return {made(4), made(2), made(2), at::randn({2, 12, 16}, at::kDouble)};
}

struct Result {
  at::Tensor out, of_q, of_k, of_v;
};
Result of_one_process(const Whole& whole) {
  const at::Tensor q = whole.q.clone().requires_grad_(true),
                   k = whole.k.clone().requires_grad_(true),
                   v = whole.v.clone().requires_grad_(true);
  const at::Tensor out = causal_attention(q, k, v, AttentionImpl::kEager, SoftmaxDtype::kWide, {});
  out.backward(whole.gradient);
  return {out.detach(), q.grad(), k.grad(), v.grad()};
}

void expect_that_of_one_process(ContextOrder order, bool is_ring) {
  const Whole whole = whole_sequences();
  const Result wanted = of_one_process(whole);
  ThreadWorld world(kRanks);
  world.run([&](Communicator& cp) {
    ASSERT_EQ(cp.size(), kRanks);
    const ContextSplit split(order, kRanks, cp.rank());
    const auto leaf = [&](const at::Tensor& of) {
      return split.own_part(of, 2).requires_grad_(true);
    };
    const at::Tensor q = leaf(whole.q), k = leaf(whole.k), v = leaf(whole.v);

    at::Tensor out;
    if (is_ring) {
      out = ring_attention(q, {k, v}, split, cp, std::nullopt, "attention");
    } else {
      const auto [all_k, all_v] = gathered_context({k, v}, split, cp, "attention");
      out = causal_attention(q, all_k, all_v, AttentionImpl::kEager, SoftmaxDtype::kWide, {},
                             split.positions(12));
    }
    out.backward(split.own_part(whole.gradient, 1));

    // fp64: a wrong mask, block or order is far from 1e-12
    EXPECT_TRUE(at::allclose(out, split.own_part(wanted.out, 1), 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(q.grad(), split.own_part(wanted.of_q, 2), 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(k.grad(), split.own_part(wanted.of_k, 2), 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(v.grad(), split.own_part(wanted.of_v, 2), 1e-12, 1e-12));
  });
}

TEST(ContextAttention, OfGatheredKeysIsThatOfOneProcess) {
  expect_that_of_one_process(ContextOrder::kHeadTail, /*is_ring=*/false);
  expect_that_of_one_process(ContextOrder::kContiguous, /*is_ring=*/false);
}

TEST(ContextAttention, OfARingIsThatOfOneProcess) {
  expect_that_of_one_process(ContextOrder::kHeadTail, /*is_ring=*/true);
  expect_that_of_one_process(ContextOrder::kContiguous, /*is_ring=*/true);
}

TEST(ContextAttention, MergesBlocksInTheDtypeThatIsAsked) {
  const Whole whole = whole_sequences();
  ThreadWorld world(2);
  world.run([&](Communicator& cp) {
    const ContextSplit split(ContextOrder::kHeadTail, 2, cp.rank());
    const auto part = [&](const at::Tensor& of) { return split.own_part(of, 2).to(at::kFloat); };
    const KeysValues own{part(whole.k), part(whole.v)};
    const at::Tensor q = part(whole.q);

    const at::Tensor exact = ring_attention(q, own, split, cp, std::nullopt, "attention");
    const at::Tensor rounded = ring_attention(q, own, split, cp, Dtype::kBFloat16, "attention");

    EXPECT_FALSE(at::equal(exact, rounded));
    EXPECT_TRUE(at::allclose(exact, rounded, 0.05, 0.05));
  });
}

}  // namespace
}  // namespace isoshard
