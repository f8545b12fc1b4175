// SPDX-License-Identifier: Apache-2.0
// The rates of each schedule at the steps where its formula can be read off.
#include "subjects/optim/learning_rate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "core/base/error.h"

namespace isoshard {
namespace {

using RateKind = LearningRateSettings::Kind;

TEST(LearningRateSchedule, ConstantIsTheRateItself) {
  const LearningRate rate(0.1, {});

  for (const int step : {0, 1, 1000000}) EXPECT_EQ(rate.at(step), 0.1);
}

TEST(LearningRateSchedule, WarmUpRisesFromZeroInEqualParts) {
  for (const RateKind kind : {RateKind::kConstant, RateKind::kLinear, RateKind::kCosine}) {
    const LearningRate rate(0.5, {kind, 4, 20, 0});

    EXPECT_EQ(rate.at(0), 0.0);
    EXPECT_EQ(rate.at(1), 0.125);
    EXPECT_EQ(rate.at(3), 0.375);
    EXPECT_EQ(rate.at(4), 0.5);
  }
}

TEST(LearningRateSchedule, LinearFallsToItsLowestRateAndStays) {
  const LearningRate to_zero(0.5, {RateKind::kLinear, 2, 10, 0}),
      to_some(0.5, {RateKind::kLinear, 2, 10, 0.25});

  EXPECT_EQ(to_zero.at(6), 0.25);
  EXPECT_EQ(to_zero.at(9), 0.0625);
  EXPECT_EQ(to_zero.at(10), 0.0);
  EXPECT_EQ(to_zero.at(99), 0.0);
  EXPECT_EQ(to_some.at(6), 0.375);
  EXPECT_EQ(to_some.at(99), 0.25);
}

TEST(LearningRateSchedule, CosineIsAHalfWave) {
  const LearningRate rate(0.5, {RateKind::kCosine, 0, 8, 0.1});

  EXPECT_EQ(rate.at(0), 0.5);
  EXPECT_DOUBLE_EQ(rate.at(4), 0.3);
  EXPECT_DOUBLE_EQ(rate.at(2), 0.1 + 0.4 * (0.5 + std::sqrt(0.125)));
  EXPECT_DOUBLE_EQ(rate.at(8), 0.1);
  EXPECT_DOUBLE_EQ(rate.at(100), 0.1) << "it does not rise again";
}

TEST(LearningRateSchedule, RefusesWhatHasNoMeaning) {
  EXPECT_THROW(LearningRate(0.1, {RateKind::kLinear, 5, 5, 0}), UsageError);
  EXPECT_THROW(LearningRate(0.1, {RateKind::kCosine, 0, 0, 0}), UsageError);
  EXPECT_THROW(LearningRate(0.1, {RateKind::kLinear, -1, 5, 0}), UsageError);
  EXPECT_THROW(LearningRate(0.1, {RateKind::kLinear, 0, 5, 0.2}), UsageError);
  EXPECT_THROW(LearningRate(0.1, {RateKind::kConstant, 0, 5, 0.05}), UsageError);
  EXPECT_THROW(
      LearningRate(0.1, {RateKind::kLinear, 0, 5, std::numeric_limits<double>::quiet_NaN()}),
      UsageError);
}

TEST(LearningRateSchedule, NamesAreParsedAndOthersRefusedWithASuggestion) {
  for (const RateKind kind : {RateKind::kConstant, RateKind::kLinear, RateKind::kCosine})
    EXPECT_EQ(parse_learning_rate_schedule(name_of(kind)), kind);
  try {
    (void)parse_learning_rate_schedule("cosin");
    FAIL() << "cosin was taken";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'cosine'?"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace isoshard
