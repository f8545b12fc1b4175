// SPDX-License-Identifier: Apache-2.0
// Shares of what masks and noise leave, and when they are too little.
#include "harness/verdict/judged_share.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "harness/testing/said_matchers.h"
#include "harness/verdict/sensitivity.h"

namespace isoshard {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

TensorComparison tensor(RecordKind kind, int step, std::int64_t elements, double share = 1,
                        bool insensitive = false) {
  TensorComparison t;
  t.key = {step, kind, "w", kind == RecordKind::kParam ? 1 : 0};
  t.stage = stage_of(t.key);
  t.elements = elements;
  t.unmasked_share = share;
  t.insensitive = insensitive;
  return t;
}

TEST(JudgedShares, AreOfElementsAndTheLeastIsNamed) {
  const std::vector<TensorComparison> tensors{
      tensor(RecordKind::kParam, 0, 300, 0.8), tensor(RecordKind::kParam, 1, 100, 0.2),
      tensor(RecordKind::kGrad, 0, 60), tensor(RecordKind::kGrad, 0, 40, 1, true)};

  const JudgedShare share = judged_share_of(tensors);

  EXPECT_DOUBLE_EQ(share.of_steps, 0.65);
  EXPECT_EQ(share.least, 0.2);
  EXPECT_EQ(share.least_tensor, "parameter after step w (step 1)");
  EXPECT_EQ(share.insensitive, 1);
  EXPECT_DOUBLE_EQ(share.insensitive_gradients, 0.4);
  EXPECT_EQ(judged_words(share),
            "65 % of elements judged, least 20 % in parameter after step w (step 1)");
  EXPECT_THAT(judged_words(judged_share_of({})), IsEmpty());
  EXPECT_EQ(judged_share_of({}).of_steps, 1) << "nothing was masked";
}

TEST(JudgedShares, TooLittleInEveryStepShowsTooLittle) {
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16}) {
    const double least = least_judged_share(dtype);
    const auto said = [&](double first, double second) {
      return too_little_judged(std::vector{tensor(RecordKind::kParam, 0, 1000, first),
                                           tensor(RecordKind::kParam, 1, 1000, second)},
                               dtype);
    };
    EXPECT_TRUE(said(1.01 * least, 0).empty()) << "one step shows the rule";
    EXPECT_THAT(said(0.99 * least, 0), RuleIs(RuleId::kTooFewStepsJudged));
  }
  EXPECT_TRUE(too_little_judged({}, Dtype::kFloat32).empty());
}

TEST(JudgedShares, TooManyInsensitiveGradientsShowTooLittle) {
  const auto said = [](std::int64_t insensitive) {
    return too_little_judged(
        std::vector{tensor(RecordKind::kGrad, 0, 1000), tensor(RecordKind::kGrad, 1, 1000),
                    tensor(RecordKind::kGrad, 1, insensitive, 1, true)},
        Dtype::kBFloat16);
  };
  const auto most = static_cast<std::int64_t>(1000 * most_insensitive_gradients() /
                                              (1 - most_insensitive_gradients()));
  EXPECT_TRUE(said(most - 10).empty());
  EXPECT_THAT(said(most + 10), RuleIs(RuleId::kTooManyInsensitive));
}

TEST(JudgedShares, NoiseThatCouldBeAsLargeAsWhatMattersIsWeak) {
  TensorComparison t = tensor(RecordKind::kGrad, 0, 10, 1, true);
  t.allowed_absolute = 0.9e-3;

  EXPECT_THAT(weakness_of_noise(t, 1, Dtype::kFloat32), IsEmpty());
  EXPECT_THAT(weakness_of_noise(t, 0.8, Dtype::kFloat32), HasSubstr("would pass as noise"));
  EXPECT_THAT(weakness_of_noise(t, 0.8, Dtype::kBFloat16), IsEmpty()) << "its ceiling is 0.5";
  t.insensitive = false;
  EXPECT_THAT(weakness_of_noise(t, 0.8, Dtype::kFloat32), IsEmpty());
}

}  // namespace
}  // namespace isoshard
