// SPDX-License-Identifier: Apache-2.0
// One column- and one row-parallel layer on forked ranks, on
// ordinary floats, against the unsharded layer. Legend: M rows, I input features, O output
// features.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "harness/testing/run_world.h"
#include "subjects/model/config/builtin.h"
#include "subjects/model/ops/linear.h"
#include "subjects/model/weights.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"

namespace isoshard {
namespace {

constexpr std::int64_t kRows = 21, kIn = 96, kOut = 144;

at::Tensor normals(std::string name, Shape shape, Dtype dtype) {
  ParameterSpec spec;
  spec.name = std::move(name);
  spec.shape = shape;
  return InitialWeights(0, 1.0, false)
      .read(spec, Shape(shape.size(), 0), shape)
      .to(scalar_type_of(dtype));
}

struct Layer {
  explicit Layer(Dtype dtype, std::int64_t rows = kRows, std::int64_t in = kIn,
                 std::int64_t out = kOut)
      : x_MI(normals("x", {rows, in}, dtype)),
        weight_OI(normals("weight", {out, in}, dtype)),
        bias_O(normals("bias", {out}, dtype)) {}
  at::Tensor x_MI, weight_OI, bias_O;
  [[nodiscard]] at::Tensor whole() const { return apply_linear(x_MI, weight_OI, bias_O); }
};

bool is_narrow(Dtype dtype) {
  return dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat16;
}

// Error of a sum of n products against the exact one, relative to the sum of abs(products): gamma_n
// of the accumulator (fp32 for bf16 and fp16), and roundings to these: once per partial, once after
// the sum over ranks, once after the bias.
// Source   Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sec. 3.1.
double relative_bound(Dtype dtype, std::int64_t n) {
  const Dtype accumulator = is_narrow(dtype) ? Dtype::kFloat32 : dtype;
  const double roundings = is_narrow(dtype) ? 3 * unit_roundoff(dtype) : 0;
  return roundings + static_cast<double>(n + 2) * unit_roundoff(accumulator);
}

// For two computations of the layer's output against each other.
at::Tensor bound_of(const Layer& layer, Dtype dtype) {
  const auto magnitude = [](const at::Tensor& tensor) { return tensor.to(at::kDouble).abs(); };
  return at::linear(magnitude(layer.x_MI), magnitude(layer.weight_OI), magnitude(layer.bias_O)) *
         (2 * relative_bound(dtype, layer.x_MI.size(1)));
}

bool within(const at::Tensor& actual, const at::Tensor& reference, const at::Tensor& bound) {
  return (actual.to(at::kDouble) - reference.to(at::kDouble)).abs().le(bound).all().item<bool>();
}

ShardPlan plan_of(ShardKind kind) {
  ShardPlan plan;
  plan.kinds = {{"m.weight", kind}, {"m.bias", kind}};
  return plan;
}

using DegreeAndDtype = std::tuple<int, Dtype>;
std::string degree_and_dtype_name(const ::testing::TestParamInfo<DegreeAndDtype>& info) {
  return "tp" + std::to_string(std::get<0>(info.param)) + "_" +
         std::string(name_of(std::get<1>(info.param)));
}
const auto kAll = ::testing::Combine(
    ::testing::Values(1, 2, 3),
    ::testing::Values(Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16));

class ColumnParallelLinear : public ::testing::TestWithParam<DegreeAndDtype> {};

TEST_P(ColumnParallelLinear, OutputIsTheSliceOfTheWhole) {
  const auto [tp, dtype] = GetParam();
  const Layer layer(dtype);
  const at::Tensor whole = layer.whole();
  const at::Tensor bound = bound_of(layer, dtype);

  run_world(tp, [&, degree = tp, type = dtype](Rank& rank) {
    ASSERT_EQ(rank.size(), degree);
    const auto own = [&](const at::Tensor& tensor, int dim) {
      return tensor.chunk(degree, dim)[static_cast<std::size_t>(rank.rank())];
    };
    const TensorParallelStrategy strategy(plan_of(ShardKind::kColumn), rank.comm(), 1, 1.0);
    const at::Tensor y = strategy.linear("m", layer.x_MI, own(layer.weight_OI, 0).contiguous(),
                                         own(layer.bias_O, 0).contiguous(), nullptr);

    ASSERT_EQ(y.size(1) * degree, kOut);
    EXPECT_TRUE(within(y, own(whole, 1), own(bound, 1)));
    // Where LibTorch has a bf16 kernel, its result does not depend on the number of output columns
    // (docs/internals/facts.md).
    const bool has_kernel = type == Dtype::kBFloat16 && detail::has_product_kernels(at::kBFloat16);
    if (has_kernel || degree == 1) {
      EXPECT_TRUE(at::equal(y, own(whole, 1)));
    }
  });
}

TEST_P(ColumnParallelLinear, InputGradientIsSummedOverTp) {
  const auto [tp, dtype] = GetParam();
  const Layer layer(dtype);
  const at::Tensor cotangent = normals("cotangent", {kRows, kOut}, dtype);
  const at::Tensor exact = at::matmul(cotangent.to(at::kDouble), layer.weight_OI.to(at::kDouble));
  const at::Tensor bound =
      at::matmul(cotangent.to(at::kDouble).abs(), layer.weight_OI.to(at::kDouble).abs()) *
      (2 * relative_bound(dtype, kOut));

  run_world(tp, [&, degree = tp](Rank& rank) {
    const auto own = [&](const at::Tensor& tensor, int dim) {
      return tensor.chunk(degree, dim)[static_cast<std::size_t>(rank.rank())].contiguous();
    };
    const TensorParallelStrategy strategy(plan_of(ShardKind::kColumn), rank.comm(), 1, 1.0);
    const at::Tensor x = layer.x_MI.clone().requires_grad_(true);
    const at::Tensor y = strategy.linear("m", x, own(layer.weight_OI, 0), std::nullopt, nullptr);
    (y * own(cotangent, 1)).sum().backward();

    EXPECT_TRUE(within(x.grad(), exact, bound));
    // A part alone is not the gradient: the bound above can fail.
    if (degree > 1) {
      EXPECT_FALSE(within(at::matmul(own(cotangent, 1), own(layer.weight_OI, 0)), exact, bound));
    }
  });
}

// One token, and features that are multiples of the degree and of nothing else.
TEST(ColumnParallelLinear, OfOneRowAndOddFeaturesIsTheSliceOfTheWhole) {
  const Layer layer(Dtype::kFloat32, 1, 97, 111);
  const at::Tensor whole = layer.whole(), bound = bound_of(layer, Dtype::kFloat32);

  run_world(3, [&](Rank& rank) {
    ASSERT_EQ(rank.size(), 3);
    const auto own = [&](const at::Tensor& tensor, int dim) {
      return tensor.chunk(3, dim)[static_cast<std::size_t>(rank.rank())].contiguous();
    };
    const TensorParallelStrategy strategy(plan_of(ShardKind::kColumn), rank.comm(), 1, 1.0);
    const at::Tensor y =
        strategy.linear("m", layer.x_MI, own(layer.weight_OI, 0), own(layer.bias_O, 0), nullptr);

    ASSERT_EQ(y.size(1), 37);
    EXPECT_TRUE(within(y, own(whole, 1), own(bound, 1)));
  });
}

TEST(ColumnParallelLinear, OfFeaturesThatTheDegreeDoesNotDivideIsRefusedWithTheNumbers) {
  using ::testing::HasSubstr;
  ModelConfig config = builtin_config("tiny");
  config.intermediate_size = 97;
  const auto model = make_model(config, AttentionImpl::kEager);

  EXPECT_THAT([&] { (void)autotp_plan(*model, 2); },
              ::testing::ThrowsMessage<UsageError>(
                  ::testing::AllOf(HasSubstr("tp 2"), HasSubstr("97 ffn features"))));
}

INSTANTIATE_TEST_SUITE_P(Degrees, ColumnParallelLinear, kAll, degree_and_dtype_name);

class RowParallelLinear : public ::testing::TestWithParam<DegreeAndDtype> {};

TEST_P(RowParallelLinear, OutputIsTheWholeOneOnEveryRankAlike) {
  const auto [tp, dtype] = GetParam();
  const Layer layer(dtype);
  const at::Tensor whole = layer.whole();
  const at::Tensor bound = bound_of(layer, dtype);

  run_world(tp, [&, degree = tp](Rank& rank) {
    const auto own = [&](const at::Tensor& tensor) {
      return tensor.chunk(degree, 1)[static_cast<std::size_t>(rank.rank())].contiguous();
    };
    const TensorParallelStrategy strategy(plan_of(ShardKind::kRow), rank.comm(), 1, 1.0);
    const at::Tensor weight = own(layer.weight_OI);
    ASSERT_EQ(weight.numel() * degree, layer.weight_OI.numel());
    const at::Tensor y = strategy.linear("m", own(layer.x_MI), weight, layer.bias_O, nullptr);

    EXPECT_TRUE(within(y, whole, bound));
    const at::Tensor all = all_gather(rank.comm(), y.unsqueeze(0).contiguous(),
                                      {Purpose::kUnspecified, Axis::kTp, {}});
    for (int other = 0; other < degree; ++other)
      EXPECT_TRUE(at::equal(all[other], y)) << "rank " << other;
  });
}

TEST_P(RowParallelLinear, OwnPartialAloneIsOutsideTheBound) {
  const auto [tp, dtype] = GetParam();
  if (tp == 1) {
    SUCCEED() << "the partial of a group of one is the whole";
    return;
  }
  const Layer layer(dtype);
  const at::Tensor partial =
      at::linear(layer.x_MI.chunk(tp, 1)[0], layer.weight_OI.chunk(tp, 1)[0], layer.bias_O);

  EXPECT_FALSE(within(partial, layer.whole(), bound_of(layer, dtype)));
}

TEST(RowParallelLinear, OfOneRowAndOddFeaturesIsTheWholeOne) {
  const Layer layer(Dtype::kFloat32, 1, 111, 97);
  const at::Tensor whole = layer.whole(), bound = bound_of(layer, Dtype::kFloat32);

  run_world(3, [&](Rank& rank) {
    ASSERT_EQ(rank.size(), 3);
    const auto own = [&](const at::Tensor& tensor) {
      return tensor.chunk(3, 1)[static_cast<std::size_t>(rank.rank())].contiguous();
    };
    const TensorParallelStrategy strategy(plan_of(ShardKind::kRow), rank.comm(), 1, 1.0);
    const at::Tensor x = own(layer.x_MI);

    ASSERT_EQ(x.size(1), 37);
    EXPECT_TRUE(
        within(strategy.linear("m", x, own(layer.weight_OI), layer.bias_O, nullptr), whole, bound));
    EXPECT_FALSE(within(at::linear(x, own(layer.weight_OI), layer.bias_O), whole, bound));
  });
}

INSTANTIATE_TEST_SUITE_P(Degrees, RowParallelLinear, kAll, degree_and_dtype_name);

}  // namespace
}  // namespace isoshard
