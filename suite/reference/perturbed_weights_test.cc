// SPDX-License-Identifier: Apache-2.0
// Every weight moves by one ulp of the compute dtype, the same way in any box.
#include "suite/reference/perturbed_weights.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace isoshard {
namespace {

ParameterSpec matrix_spec() {
  ParameterSpec spec;
  spec.name = "m.weight";
  spec.shape = {7, 130};
  return spec;
}

TEST(PerturbedWeights, MoveEveryElementByOneUlpUpOrDown) {
  const ParameterSpec spec = matrix_spec();
  const auto inner = std::make_shared<InitialWeights>(0, 0.02, false);
  const at::Tensor before = inner->read(spec, {0, 0}, spec.shape);

  const at::Tensor after =
      PerturbedWeights(inner, 1, Dtype::kFloat32).read(spec, {0, 0}, spec.shape);

  const at::Tensor up =
      at::nextafter(before, at::full_like(before, std::numeric_limits<float>::infinity()));
  const at::Tensor down =
      at::nextafter(before, at::full_like(before, -std::numeric_limits<float>::infinity()));
  EXPECT_TRUE((after.eq(up) | after.eq(down)).all().item<bool>());
  const double share_up = after.eq(up).to(at::kDouble).mean().item<double>();
  EXPECT_GT(share_up, 0.4);
  EXPECT_LT(share_up, 0.6);
}

// fp32 weights that a matrix product reads in bf16: an ulp of their own would be rounded away.
TEST(PerturbedWeights, UnderAutocastMoveByAnUlpOfWhatTheyAreRoundedTo) {
  ParameterSpec spec = matrix_spec();
  const auto inner = std::make_shared<InitialWeights>(0, 0.02, false);
  const at::Tensor before = inner->read(spec, {0, 0}, spec.shape);
  for (const Dtype autocast : {Dtype::kBFloat16, Dtype::kFloat16}) {
    const at::ScalarType narrow = autocast == Dtype::kBFloat16 ? at::kBFloat16 : at::kHalf;
    const auto steps = [&](ParamClass param_class) {
      spec.param_class = param_class;
      const at::Tensor after =
          PerturbedWeights(inner, 1, Dtype::kFloat32, autocast).read(spec, {0, 0}, spec.shape);
      EXPECT_EQ(after.scalar_type(), at::kFloat);
      EXPECT_FALSE(at::equal(after, before));
      return (after.to(narrow).view(at::kShort).to(at::kInt) -
              before.to(narrow).view(at::kShort).to(at::kInt))
          .abs();
    };

    EXPECT_GT(steps(ParamClass::kMatrix).eq(1).to(at::kDouble).mean().item<double>(), 0.99);
    EXPECT_GT(steps(ParamClass::kTied).eq(1).to(at::kDouble).mean().item<double>(), 0.99);
    EXPECT_LT(steps(ParamClass::kEmbedding).to(at::kDouble).mean().item<double>(), 0.01);
    EXPECT_LT(steps(ParamClass::kNorm).to(at::kDouble).mean().item<double>(), 0.01);
  }
}

TEST(PerturbedWeights, RoundToTheComputeDtypeFirst) {
  const ParameterSpec spec = matrix_spec();
  const auto inner = std::make_shared<InitialWeights>(0, 0.02, false);
  const at::Tensor rounded = inner->read(spec, {0, 0}, spec.shape).to(at::kBFloat16);

  const at::Tensor after =
      PerturbedWeights(inner, 1, Dtype::kBFloat16).read(spec, {0, 0}, spec.shape);

  ASSERT_EQ(after.scalar_type(), at::kBFloat16);
  const at::Tensor steps =
      (after.view(at::kShort).to(at::kInt) - rounded.view(at::kShort).to(at::kInt)).abs();
  EXPECT_TRUE(steps.eq(1).all().item<bool>());
}

TEST(PerturbedWeights, AnyBoxIsASliceOfTheWhole) {
  const ParameterSpec spec = matrix_spec();
  const auto inner = std::make_shared<InitialWeights>(0, 0.02, false);
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
    const PerturbedWeights weights(inner, 2, dtype);
    const at::Tensor whole = weights.read(spec, {0, 0}, spec.shape);

    const at::Tensor box = weights.read(spec, {2, 61}, {4, 69});

    EXPECT_TRUE(at::equal(box, whole.slice(0, 2, 6).slice(1, 61, 130))) << name_of(dtype);
  }
}

// Special values of a weight file.
class SpecialWeights final : public WeightSource {
 public:
  [[nodiscard]] at::Tensor read(const ParameterSpec&, const Shape&, const Shape&) const override {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return at::tensor({0.0F, -0.0F, kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::max()});
  }
};

TEST(PerturbedWeights, StayFiniteAtZeroAndAtTheLargestValue) {
  ParameterSpec spec;
  spec.name = "special";
  spec.shape = {6};
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const at::Tensor after =
        PerturbedWeights(std::make_shared<SpecialWeights>(), seed, Dtype::kFloat32)
            .read(spec, {0}, {6});

    EXPECT_EQ(std::abs(after[0].item<float>()), std::numeric_limits<float>::denorm_min());
    EXPECT_EQ(std::abs(after[1].item<float>()), std::numeric_limits<float>::denorm_min());
    EXPECT_TRUE(std::isinf(after[2].item<float>()) && std::isinf(after[3].item<float>()) &&
                std::isnan(after[4].item<float>()));
    EXPECT_TRUE(std::isfinite(after[5].item<float>()));
  }
}

}  // namespace
}  // namespace isoshard
