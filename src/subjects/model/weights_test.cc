// SPDX-License-Identifier: Apache-2.0
// Initial weights: any box has the same bits as the whole tensor there.
#include "subjects/model/weights.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/random/normal.h"

namespace isoshard {
namespace {

const ParameterSpec kMatrix{
    "model.layers.0.mlp.up_proj.weight", {12, 10}, ParamClass::kMatrix, ParamInit::kNormal};
const ParameterSpec kCube{"cube", {4, 6, 5}, ParamClass::kMatrix, ParamInit::kNormal};

at::Tensor whole(const WeightSource& source, const ParameterSpec& spec) {
  return source.read(spec, Shape(spec.shape.size(), 0), spec.shape);
}

TEST(InitialWeightsBoxes, EveryElementIsTheNormalOfItsFlatIndex) {
  const InitialWeights weights(7, 0.02, false);

  const at::Tensor matrix = whole(weights, kMatrix).flatten();

  for (std::int64_t i = 0; i < matrix.numel(); ++i) {
    EXPECT_EQ(matrix[i].item<float>(),
              static_cast<float>(
                  0.0 + 0.02 * standard_normal(7, kMatrix.name, static_cast<std::uint64_t>(i))));
  }
}

TEST(InitialWeightsBoxes, AnyBoxOfAMatrixIsTheSliceOfTheWhole) {
  const InitialWeights weights(7, 0.02, false);
  const at::Tensor matrix = whole(weights, kMatrix);
  int boxes = 0;
  for (std::int64_t row = 0; row <= 12; row += 3) {
    for (std::int64_t column = 0; column <= 10; column += 5) {
      for (std::int64_t rows = 0; row + rows <= 12; ++rows) {
        for (std::int64_t columns = 0; column + columns <= 10; ++columns, ++boxes) {
          const at::Tensor box = weights.read(kMatrix, {row, column}, {rows, columns});
          EXPECT_TRUE(at::equal(box, matrix.narrow(0, row, rows).narrow(1, column, columns)))
              << row << ' ' << column << ' ' << rows;
          EXPECT_TRUE(box.is_contiguous());
        }
      }
    }
  }
  EXPECT_GT(boxes, 500);
}

TEST(InitialWeightsBoxes, ThreeDimensionsInEveryMixtureOfWholeAndPart) {
  const InitialWeights weights(3, 1.0, false);
  const at::Tensor cube = whole(weights, kCube);
  for (int mixture = 0; mixture < 8; ++mixture) {
    Shape offset(3, 0), size = kCube.shape;
    for (std::size_t dim = 0; dim < 3; ++dim) {
      if ((mixture >> dim & 1) != 0) offset[dim] = 1, size[dim] -= 2;
    }
    const at::Tensor box = weights.read(kCube, offset, size);
    EXPECT_TRUE(at::equal(box, cube.narrow(0, offset[0], size[0])
                                   .narrow(1, offset[1], size[1])
                                   .narrow(2, offset[2], size[2])))
        << mixture;
  }
}

TEST(InitialWeightsBoxes, SeedsAndNamesGiveDifferentNumbers) {
  ParameterSpec other = kMatrix;
  other.name = "model.layers.1.mlp.up_proj.weight";
  const at::Tensor matrix = whole(InitialWeights(7, 0.02, false), kMatrix);

  EXPECT_FALSE(at::equal(matrix, whole(InitialWeights(8, 0.02, false), kMatrix)));
  EXPECT_FALSE(at::equal(matrix, whole(InitialWeights(7, 0.02, false), other)));
  EXPECT_TRUE(at::equal(matrix, whole(InitialWeights(7, 0.02, false), kMatrix)));
}

TEST(InitialWeightsValues, NormsAreOneAndBiasesZeroUnlessGeneric) {
  const ParameterSpec norm{"model.norm.weight", {64}, ParamClass::kNorm, ParamInit::kOnes};
  const ParameterSpec bias{
      "model.layers.0.self_attn.q_proj.bias", {64}, ParamClass::kBias, ParamInit::kZeros};
  const InitialWeights plain(1, 0.02, false), generic(1, 0.02, true);

  EXPECT_TRUE(at::equal(whole(plain, norm), at::ones({64})));
  EXPECT_TRUE(at::equal(whole(plain, bias), at::zeros({64})));
  EXPECT_EQ(whole(generic, norm).eq(1).sum().item<std::int64_t>(), 0);
  EXPECT_EQ(whole(generic, bias).eq(0).sum().item<std::int64_t>(), 0);
  EXPECT_NEAR(whole(generic, norm).mean().item<double>(), 1.0, 0.05);
  EXPECT_NEAR(whole(generic, bias).std().item<double>(), 0.1, 0.03);
}

TEST(InitialWeightsValues, SparseRowsHaveTheirNumberOfSigns) {
  const InitialWeights weights(7, 0.02, false);
  for (const std::int64_t nonzeros : {1, 2, 3}) {
    ParameterSpec spec{
        "model.layers.0.mlp.up_proj.weight", {64, 10}, ParamClass::kMatrix, ParamInit::kSparseRows};
    spec.row_nonzeros = nonzeros;

    const at::Tensor rows = whole(weights, spec);

    EXPECT_TRUE((rows.ne(0).sum(1) == nonzeros).all().item<bool>());
    EXPECT_TRUE((rows.abs() <= 1).all().item<bool>());
    EXPECT_GT(rows.eq(1).sum().item<std::int64_t>(), 16);
    EXPECT_GT(rows.eq(-1).sum().item<std::int64_t>(), 16);
    EXPECT_TRUE((rows.ne(0).sum(0) > 0).all().item<bool>()) << "a column that no row reads";
    EXPECT_TRUE(
        at::equal(weights.read(spec, {5, 3}, {20, 4}), rows.narrow(0, 5, 20).narrow(1, 3, 4)));
  }
}

TEST(InitialWeightsValues, SignsAreHalfZero) {
  const InitialWeights weights(7, 0.02, false);
  const ParameterSpec spec{
      "model.embed_tokens.weight", {40, 25}, ParamClass::kEmbedding, ParamInit::kSigns};

  const at::Tensor signs = whole(weights, spec);

  EXPECT_NEAR(static_cast<double>(signs.eq(0).sum().item<std::int64_t>()), 500, 60);
  EXPECT_NEAR(static_cast<double>(signs.eq(1).sum().item<std::int64_t>()), 250, 50);
  EXPECT_NEAR(static_cast<double>(signs.eq(-1).sum().item<std::int64_t>()), 250, 50);
  EXPECT_TRUE(
      at::equal(weights.read(spec, {5, 3}, {20, 4}), signs.narrow(0, 5, 20).narrow(1, 3, 4)));
}

TEST(InitialWeightsRefusals, ABoxOutsideTheParameter) {
  const InitialWeights weights(7, 0.02, false);

  EXPECT_THROW(static_cast<void>(weights.read(kMatrix, {0, 1}, {12, 10})), ShapeError);
  EXPECT_THROW(static_cast<void>(weights.read(kMatrix, {-1, 0}, {2, 10})), ShapeError);
  EXPECT_THROW(static_cast<void>(weights.read(kMatrix, {0}, {12})), ShapeError);
}

}  // namespace
}  // namespace isoshard
