// SPDX-License-Identifier: Apache-2.0
// Every weight moves by one ulp of the dtype that it is used in, the same way in any box.
#include "suite/reference/perturbed_weights.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>

namespace isoshard {
namespace {

ParameterSpec matrix_spec() {
  ParameterSpec spec;
  spec.name = "m.weight";
  spec.shape = {7, 130};
  return spec;
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

}  // namespace
}  // namespace isoshard
