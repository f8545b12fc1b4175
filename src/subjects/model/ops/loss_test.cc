// SPDX-License-Identifier: Apache-2.0
// The loss against torch's own cross_entropy, value and
// gradient, with unequal counts and weights per sample.
#include "subjects/model/ops/loss.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/base/error.h"

namespace isoshard {
namespace {

constexpr std::int64_t kBatch = 3, kLength = 7, kVocabulary = 11;

struct Inputs {
  at::Tensor logits, targets;
};

/// Sample 1 counts 3 tokens, sample 2 none.
Inputs unequal_inputs(at::ScalarType dtype) {
  at::Generator generator = at::detail::createCPUGenerator(5);
  Inputs inputs{(at::randn({kBatch, kLength, kVocabulary}, generator, at::kDouble) * 3).to(dtype),
                at::randint(0, kVocabulary, {kBatch, kLength}, generator, at::kLong)};
  inputs.targets[1].slice(0, 3).fill_(-100);
  inputs.targets[2].fill_(-100);
  return inputs;
}

struct Result {
  at::Tensor loss, gradient;
};

/// torch's: sum over samples of weight times the summed loss of the sample.
Result torchs(const Inputs& inputs, const at::Tensor& weights) {
  const at::Tensor logits = inputs.logits.detach().clone().requires_grad_(true);
  const at::ScalarType wide = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor loss = at::zeros({}, wide);
  for (std::int64_t b = 0; b < logits.size(0); ++b) {
    loss = loss + at::cross_entropy_loss(logits[b].to(wide), inputs.targets[b], {},
                                         at::Reduction::Sum, -100) *
                      weights[b].to(wide);
  }
  loss.backward();
  return {loss.detach(), logits.grad()};
}

Result ours(const Inputs& inputs, const at::Tensor& weights, const LossOptions& options = {}) {
  const at::Tensor logits = inputs.logits.detach().clone().requires_grad_(true);
  const at::Tensor loss = cross_entropy(logits, inputs.targets, weights, options).loss;
  loss.backward();
  return {loss.detach(), logits.grad()};
}

double relative(const at::Tensor& reference, const at::Tensor& actual) {
  return ((actual.to(at::kDouble) - reference.to(at::kDouble)).norm() /
          reference.to(at::kDouble).norm())
      .item<double>();
}

class LossInDtype : public testing::TestWithParam<std::pair<at::ScalarType, double>> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, LossInDtype,
                         testing::Values(std::pair{at::kDouble, 1e-15}, std::pair{at::kFloat, 2e-7},
                                         std::pair{at::kBFloat16, 2e-7},
                                         std::pair{at::kHalf, 2e-7}),
                         [](const auto& tested) {
                           return std::string(at::toString(tested.param.first));
                         });

TEST_P(LossInDtype, ValueAndGradientAreTorchsForUniformAndOwnWeights) {
  const auto [dtype, bound] = GetParam();
  const Inputs inputs = unequal_inputs(dtype);
  for (const at::Tensor& weights :
       {at::full({kBatch}, 1.0 / 10, at::kDouble), at::tensor({0.5, 0.125, 3.0}, at::kDouble)}) {
    const Result expected = torchs(inputs, weights), actual = ours(inputs, weights);

    EXPECT_LE(relative(expected.loss, actual.loss), bound);
    EXPECT_LE(relative(expected.gradient, actual.gradient),
              at::elementSize(dtype) == 2 ? 1e-4 : bound);
    EXPECT_EQ(actual.gradient.scalar_type(), dtype);
    EXPECT_EQ(actual.loss.scalar_type(), expected.loss.scalar_type());
  }
}

TEST_P(LossInDtype, ARowsGradientDoesNotDependOnTheOtherRows) {
  const auto [dtype, bound] = GetParam();
  const Inputs inputs = unequal_inputs(dtype);
  const at::Tensor weights = at::tensor({0.5, 0.125, 3.0}, at::kDouble);

  const Result whole = ours(inputs, weights);

  for (std::int64_t b = 0; b < kBatch; ++b) {
    const Inputs sample{inputs.logits.narrow(0, b, 1), inputs.targets.narrow(0, b, 1)};
    EXPECT_TRUE(
        at::equal(ours(sample, weights.narrow(0, b, 1)).gradient, whole.gradient.narrow(0, b, 1)))
        << "sample " << b;
  }
}

TEST_P(LossInDtype, BlocksOfAnySizeGiveEqualBits) {
  const auto [dtype, bound] = GetParam();
  const Inputs inputs = unequal_inputs(dtype);
  const at::Tensor weights = at::tensor({0.5, 0.125, 3.0}, at::kDouble);
  for (const double smoothing : {0.0, 0.1}) {
    LossOptions options;
    options.label_smoothing = smoothing;
    const Result expected = ours(inputs, weights, options);
    for (const std::int64_t block : {1, 4, 7, 21}) {
      options.block_rows = block;
      const Result actual = ours(inputs, weights, options);

      EXPECT_TRUE(at::equal(actual.loss, expected.loss)) << block;
      EXPECT_TRUE(at::equal(actual.gradient, expected.gradient)) << block;
    }
  }
}

TEST(CrossEntropyLoss, TheGradientIsWrittenOverTheLogits) {
  const Inputs inputs = unequal_inputs(at::kFloat);
  const at::Tensor leaf = inputs.logits.clone().requires_grad_(true);
  const at::Tensor logits = leaf * 1;
  const void* written = nullptr;
  logits.register_hook([&](const at::Tensor& gradient) { written = gradient.const_data_ptr(); });
  const at::Tensor loss =
      cross_entropy(logits, inputs.targets, at::ones({kBatch}, at::kDouble)).loss;

  loss.backward({}, /*retain_graph=*/true);

  EXPECT_EQ(written, logits.const_data_ptr());
  EXPECT_TRUE(at::equal(leaf.grad(), logits.detach()));
  EXPECT_THROW(loss.backward(), c10::Error) << "a second backward would read a gradient for logits";
}

// (1 - a) for the target and a / (V - 1) for every other entry; torch gives a / V to every entry.
TEST(LabelSmoothing, IsMegatrons) {
  const Inputs inputs = unequal_inputs(at::kDouble);
  const at::Tensor weights = at::ones({kBatch}, at::kDouble);
  constexpr double kSmoothing = 0.1;
  LossOptions options;
  options.label_smoothing = kSmoothing;
  const auto torchs_smoothed = [&](double smoothing) {
    const at::Tensor logits = inputs.logits.clone().requires_grad_(true);
    at::Tensor loss = at::cross_entropy_loss(logits.flatten(0, 1), inputs.targets.flatten(), {},
                                             at::Reduction::Sum, -100, smoothing);
    loss.backward();
    return Result{loss.detach(), logits.grad()};
  };
  const at::Tensor counted = inputs.targets != -100;
  const at::Tensor log_p = at::log_softmax(inputs.logits, -1);
  const at::Tensor of_target = log_p.gather(2, inputs.targets.clamp_min(0).unsqueeze(2)).squeeze(2);
  const at::Tensor of_others = log_p.sum(2) - of_target;
  const at::Tensor by_definition =
      -((1 - kSmoothing) * of_target + kSmoothing / (kVocabulary - 1) * of_others)
           .masked_select(counted)
           .sum();

  const Result actual = ours(inputs, weights, options);

  const Result same = torchs_smoothed(kSmoothing * kVocabulary / (kVocabulary - 1)),
               other = torchs_smoothed(kSmoothing);
  EXPECT_LE(relative(by_definition, actual.loss), 1e-14);
  EXPECT_LE(relative(same.loss, actual.loss), 1e-14);
  EXPECT_LE(relative(same.gradient, actual.gradient), 1e-14);
  EXPECT_GT(relative(other.loss, actual.loss), 1e-5) << "torch's own definition must be told apart";
}

TEST(LabelSmoothing, NeedsAnotherEntry) {
  LossOptions options;
  options.label_smoothing = 0.1;
  EXPECT_THROW((void)cross_entropy(at::zeros({1, 2, 1}), at::zeros({1, 2}, at::kLong),
                                   at::ones({1}, at::kDouble), options),
               ShapeError);
}

TEST(CrossEntropyLoss, SumsAndCountsAreGivenPerSample) {
  const Inputs inputs = unequal_inputs(at::kDouble);

  const CrossEntropy result =
      cross_entropy(inputs.logits, inputs.targets, at::ones({kBatch}, at::kDouble));

  EXPECT_TRUE(at::equal(result.sample_count_B, at::tensor({7, 3, 0}, at::kLong)));
  EXPECT_EQ(result.sample_sum_B[2].item<double>(), 0.0);
  for (std::int64_t b = 0; b < 2; ++b) {
    const at::Tensor expected =
        at::cross_entropy_loss(inputs.logits[b], inputs.targets[b], {}, at::Reduction::Sum, -100);
    EXPECT_NEAR(result.sample_sum_B[b].item<double>(), expected.item<double>(), 1e-13);
  }
  EXPECT_DOUBLE_EQ(result.loss.item<double>(), result.sample_sum_B.sum().item<double>());
  EXPECT_FALSE(result.sample_sum_B.requires_grad());
}

TEST(CrossEntropyLoss, TheUpstreamGradientScalesTheGradient) {
  const Inputs inputs = unequal_inputs(at::kFloat);
  const at::Tensor weights = at::full({kBatch}, 0.1, at::kDouble);
  const at::Tensor logits = inputs.logits.clone().requires_grad_(true);

  (cross_entropy(logits, inputs.targets, weights).loss * 4).backward();

  EXPECT_TRUE(at::equal(logits.grad(), ours(inputs, weights).gradient * 4));
}

TEST(CrossEntropyLoss, NothingCountedIsZeroWithZeroGradient) {
  Inputs inputs = unequal_inputs(at::kFloat);
  inputs.targets.fill_(-100);

  const Result result = ours(inputs, at::ones({kBatch}, at::kDouble));

  EXPECT_EQ(result.loss.item<float>(), 0.0F);
  EXPECT_EQ(result.gradient.count_nonzero().item<std::int64_t>(), 0);
}

TEST(CrossEntropyLoss, ManyRowsAreCutIntoBlocksWithoutATrace) {
  // 80 rows of 65,536 logits: two blocks of 64 rows and less.
  at::Generator generator = at::detail::createCPUGenerator(6);
  const Inputs inputs{at::randn({2, 40, 65536}, generator, at::kFloat),
                      at::randint(0, 65536, {2, 40}, generator, at::kLong)};
  const at::Tensor weights = at::full({2}, 1.0 / 80, at::kDouble);

  const Result expected = torchs(inputs, weights), actual = ours(inputs, weights);

  EXPECT_LE(relative(expected.loss, actual.loss), 2e-7);
  EXPECT_LE(relative(expected.gradient, actual.gradient), 2e-7);
}

TEST(CrossEntropyLoss, ANanLogitReachesTheLoss) {
  Inputs inputs = unequal_inputs(at::kFloat);
  inputs.logits[0][0][0].fill_(std::nan(""));

  EXPECT_TRUE(std::isnan(ours(inputs, at::ones({kBatch}, at::kDouble)).loss.item<float>()));
}

TEST(CrossEntropyLoss, RefusesShapesAndTargetsThatDoNotFit) {
  const Inputs inputs = unequal_inputs(at::kFloat);
  const at::Tensor weights = at::ones({kBatch}, at::kDouble);
  const auto loss = [](const at::Tensor& logits, const at::Tensor& targets,
                       const at::Tensor& weight) {
    static_cast<void>(cross_entropy(logits, targets, weight));
  };

  EXPECT_THROW(loss(inputs.logits[0], inputs.targets, weights), ShapeError);
  EXPECT_THROW(loss(inputs.logits, inputs.targets.slice(1, 1), weights), ShapeError);
  EXPECT_THROW(loss(inputs.logits, inputs.targets, weights.to(at::kFloat)), ShapeError);
  for (const std::int64_t wrong : {kVocabulary, std::int64_t{-1}}) {
    at::Tensor targets = inputs.targets.clone();
    targets[0][0].fill_(wrong);
    EXPECT_THROW(loss(inputs.logits, targets, weights), ShapeError) << wrong;
  }
}

TEST(ShiftLabels, MovesLeftAndIgnoresTheLast) {
  const at::Tensor labels = at::tensor({1, 2, 3, 4, -100, 6}, at::kLong).view({2, 3});

  EXPECT_TRUE(at::equal(shift_labels(labels),
                        at::tensor({2, 3, -100, -100, 6, -100}, at::kLong).view({2, 3})));
  EXPECT_TRUE(at::equal(shift_labels(labels.slice(1, 0, 1)), at::full({2, 1}, -100, at::kLong)));
}

}  // namespace
}  // namespace isoshard
