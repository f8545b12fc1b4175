// SPDX-License-Identifier: Apache-2.0
// A redrawn run is the reference's step in exact arithmetic, and another draw of its roundings.
#include "suite/reference/redrawn_run.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "fixtures/cases/presets.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

TEST(RandomCuts, TileTheDimInPiecesOfAtLeastOne) {
  std::set<std::size_t> pieces;
  std::set<std::int64_t> places;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const std::vector<std::int64_t> cuts = random_cuts(seed, "m", 10, 3);

    ASSERT_GE(cuts.size(), 3U);
    ASSERT_LE(cuts.size(), 4U);
    EXPECT_EQ(cuts.front(), 0);
    EXPECT_EQ(cuts.back(), 10);
    EXPECT_TRUE(std::adjacent_find(cuts.begin(), cuts.end(), std::greater_equal<>()) == cuts.end());
    pieces.insert(cuts.size() - 1);
    places.insert(cuts.begin() + 1, cuts.end() - 1);
  }
  EXPECT_EQ(pieces, (std::set<std::size_t>{2, 3}));
  EXPECT_EQ(places.size(), 9U);
  EXPECT_EQ(random_cuts(1, "m", 1, 3), (std::vector<std::int64_t>{0, 1}));
}

/// A linear layer's result and all gradients.
std::vector<at::Tensor> passed(const Strategy& strategy, at::ScalarType type) {
  at::manual_seed(3);
  const auto drawn = [&](at::IntArrayRef shape) {
    return at::randn(shape, at::kDouble).to(type).requires_grad_(true);
  };
  at::Tensor x = drawn({2, 12, 32}), weight = drawn({24, 32}), bias = drawn({24});
  at::Tensor table = drawn({16, 8});
  const at::Tensor ids = at::arange(24, at::kLong).remainder(16).reshape({2, 12});
  const at::Tensor y = strategy.linear("m", x, weight, bias, nullptr);
  const at::Tensor e = strategy.embedding("t", ids, table, nullptr);
  (y * at::randn(y.sizes(), at::kDouble).to(type)).sum().backward();
  (e * at::randn(e.sizes(), at::kDouble).to(type)).sum().backward();
  return {y.detach(), e.detach(), x.grad(), weight.grad(), bias.grad(), table.grad()};
}

TEST(RedrawnStrategy, IsTheUnshardedOneInExactArithmetic) {
  const std::vector<at::Tensor> plain = passed(Strategy(), at::kDouble);
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    const std::vector<at::Tensor> redrawn = passed(RedrawnStrategy(seed, {"m"}), at::kDouble);

    for (std::size_t i = 0; i < plain.size(); ++i) {
      ASSERT_EQ(redrawn[i].sizes(), plain[i].sizes());
      EXPECT_TRUE(at::allclose(redrawn[i], plain[i], 1e-13, 1e-13)) << i;
    }
  }
}

// Also one token, and query heads that share a kv head.
TEST(EqualPiecesOfModels, AreTheUnshardedStrategyInExactArithmetic) {
  const auto attended = [](const Strategy& strategy, std::int64_t kv_heads, std::int64_t length) {
    at::manual_seed(4);
    const auto drawn = [&](std::int64_t heads) {
      return at::randn({2, heads, length, 8}, at::kDouble).requires_grad_(true);
    };
    at::Tensor q = drawn(6), k = drawn(kv_heads), v = drawn(kv_heads);
    const at::Tensor out = strategy.attention("a", q, k, v, AttentionImpl::kEager,
                                              SoftmaxDtype::kWide, AttentionDropout());
    (out * at::randn(out.sizes(), at::kDouble)).sum().backward();
    return std::vector<at::Tensor>{out.detach(), q.grad(), k.grad(), v.grad()};
  };
  for (const std::int64_t kv_heads : {1, 2, 6}) {
    for (const std::int64_t length : {1, 2, 5}) {
      const std::vector<at::Tensor> plain = attended(Strategy(), kv_heads, length),
                                    pieces = attended(EqualPieces(), kv_heads, length);
      for (std::size_t i = 0; i < plain.size(); ++i) {
        ASSERT_EQ(pieces[i].sizes(), plain[i].sizes());
        EXPECT_TRUE(at::allclose(pieces[i], plain[i], 1e-12, 1e-12))
            << i << " of " << kv_heads << " kv heads, " << length << " tokens";
      }
    }
  }
  const std::vector<at::Tensor> plain = passed(Strategy(), at::kDouble),
                                pieces = passed(EqualPieces(), at::kDouble);
  for (std::size_t i = 0; i < plain.size(); ++i)
    EXPECT_TRUE(at::allclose(pieces[i], plain[i], 1e-13, 1e-13)) << i;
}

TEST(RedrawnStrategy, DrawsTheRoundingsAnewWithEachSeed) {
  const std::vector<at::Tensor> plain = passed(Strategy(), at::kBFloat16);
  const std::vector<at::Tensor> first = passed(RedrawnStrategy(1, {"m"}), at::kBFloat16);
  const std::vector<at::Tensor> second = passed(RedrawnStrategy(2, {"m"}), at::kBFloat16);
  const std::vector<at::Tensor> again = passed(RedrawnStrategy(2, {"m"}), at::kBFloat16);

  for (const std::size_t i : {0U, 2U, 3U}) {  // output, gradients of input and weight
    EXPECT_FALSE(at::equal(plain[i], first[i])) << i;
    EXPECT_FALSE(at::equal(first[i], second[i])) << i;
    EXPECT_TRUE(at::equal(second[i], again[i])) << i;
  }
}

TEST(RedrawnStrategy, CutsTheProductsOfRowLayersOnly) {
  EXPECT_TRUE(at::equal(passed(RedrawnStrategy(1, {}), at::kBFloat16)[0],
                        passed(RedrawnStrategy(2, {}), at::kBFloat16)[0]));

  const auto rows = row_modules_of(tiny_fault_case());

  EXPECT_EQ(rows.size(), 4U);
  EXPECT_TRUE(rows.contains("model.layers.0.self_attn.o_proj"));
  EXPECT_TRUE(rows.contains("model.layers.1.mlp.down_proj"));
}

TEST(RedrawnRuns, SayOfEveryGradientHowFarRoundingsMoveIt) {
  Case c = tiny_fault_case();
  c.dtype = Dtype::kBFloat16;
  c.degrees.dp = 2;
  Reference reference = make_reference(c, {.responses = 3});

  add_redrawn_runs(c, reference, 4);
  add_redrawn_runs(c, reference, 5);

  const Redrawn& redrawn = reference.redrawn();
  EXPECT_EQ(redrawn.runs, 5);
  int gradients = 0, activations = 0;
  for (const auto& [key, sums] : redrawn.sums) {
    gradients += key.kind == RecordKind::kGrad ? 1 : 0;
    activations += key.kind == RecordKind::kActivation ? 1 : 0;
    if (key.kind == RecordKind::kGrad) {
      ASSERT_EQ(sums.size(), 5U) << describe(key);
      EXPECT_NE(sums[0], sums[1]) << describe(key);
      // the norm of what moves is below that of runs with moved weights, noise apart
      if (key.name.find("k_proj.bias") == std::string::npos) {
        EXPECT_LT(std::sqrt(sums[0].sum_sq_diff), 6 * reference.response(key)->absolute_norm)
            << describe(key);
      }
    }
    // run 3, whose passes are those of the dp ranks, has activations, too
    if (key.kind == RecordKind::kActivation || role_of(key) == NameRole::kLossPerDpRank) {
      EXPECT_EQ(sums.size(), 5U) << describe(key);
    }
  }
  EXPECT_GT(gradients, 20);
  EXPECT_GT(activations, 20);
}

TEST(RedrawnRuns, AreForSixteenBitsOnly) {
  Case c = tiny_fault_case();
  c.dtype = Dtype::kFloat32;
  Reference reference = make_reference(c, {.responses = 0});

  add_redrawn_runs(c, reference);

  EXPECT_FALSE(has_redrawn_runs(c));
  EXPECT_EQ(reference.redrawn().runs, 0);
}

}  // namespace
}  // namespace isoshard
