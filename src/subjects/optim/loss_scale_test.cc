// SPDX-License-Identifier: Apache-2.0
// The rule of torch.amp.GradScaler, step by step.
#include "subjects/optim/loss_scale.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

using ScaleKind = LossScaleSettings::Kind;

std::vector<double> scales(const LossScaleSettings& settings, const std::string& steps) {
  LossScale scale(settings);
  std::vector<double> values{scale.value()};
  for (const char step : steps) {
    scale.update(step == 'x');
    values.push_back(scale.value());
  }
  return values;
}

// What torch 2.11 gives: torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, 3) from 16,
// for steps with (x) and without (.) inf.
TEST(LossScaleRule, GrowsAfterAnIntervalWithoutAndShrinksAtOnce) {
  const LossScaleSettings settings{ScaleKind::kDynamic, 16, 2, 0.5, 3};

  EXPECT_THAT(scales(settings, "...."), testing::ElementsAre(16, 16, 16, 32, 32));
  EXPECT_THAT(scales(settings, "..x...x.x"), testing::ElementsAre(16, 16, 16, 8, 8, 8, 16, 8, 8, 4))
      << "an infinity starts the count again";
  EXPECT_THAT(scales(settings, "......"), testing::ElementsAre(16, 16, 16, 32, 32, 32, 64))
      << "growth starts it again, too";
}

TEST(LossScaleRule, HasTorchsDefaults) {
  const LossScaleSettings settings;

  EXPECT_EQ(settings.initial, 65536);
  EXPECT_EQ(settings.growth_factor, 2);
  EXPECT_EQ(settings.backoff_factor, 0.5);
  EXPECT_EQ(settings.growth_interval, 2000);
  EXPECT_FALSE(settings.is_on());
}

TEST(LossScaleRule, StaysWhereAnotherGrowthIsNoFiniteNumber) {
  const double largest = 0x1p127;

  EXPECT_THAT(scales({ScaleKind::kDynamic, largest, 2, 0.5, 1}, ".x."),
              testing::ElementsAre(largest, largest, largest / 2, largest));
  EXPECT_THAT(scales({ScaleKind::kDynamic, 10, 1.1, 0.5, 1}, "."),
              testing::ElementsAre(10, static_cast<double>(11.0F)));
}

TEST(LossScaleRule, OfAStaticScaleIsToStay) {
  EXPECT_THAT(scales({ScaleKind::kStatic, 1024, 2, 0.5, 1}, "..xx."), testing::Each(1024.0));
}

TEST(LossScaleRule, GoesOnFromItsNumbers) {
  const LossScaleSettings settings{ScaleKind::kDynamic, 16, 2, 0.5, 3};
  LossScale first(settings), second(settings);
  for (const bool found : {true, false, false}) first.update(found);
  ASSERT_EQ(first.value(), 8);

  second.restore(first.numbers());

  EXPECT_EQ(second.value(), 8);
  second.update(false);
  EXPECT_EQ(second.value(), 16) << "the third step in a row without an infinity";
  LossScale fresh(settings);
  fresh.restore({});
  EXPECT_EQ(fresh.value(), 16);
  for (const double bad : {0.0, -2.0, std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN()}) {
    std::map<std::string, double, std::less<>> numbers = first.numbers();
    numbers["loss_scale"] = bad;
    EXPECT_THROW(second.restore(numbers), FileError) << bad;
  }
  std::map<std::string, double, std::less<>> fraction = first.numbers();
  fraction["loss_scale_steps_without_inf"] = 0.5;
  EXPECT_THROW(second.restore(fraction), FileError);
}

TEST(LossScaleRule, RefusesWhatIsNoScale) {
  const double inf = std::numeric_limits<double>::infinity(),
               nan = std::numeric_limits<double>::quiet_NaN();
  for (const double bad : {0.0, -1.0, inf, nan, 1e39, 1e-60})
    EXPECT_THROW(LossScale({ScaleKind::kStatic, bad}), UsageError) << bad;
  for (const double bad : {1.0, 0.5, inf, nan})
    EXPECT_THROW(LossScale({ScaleKind::kDynamic, 16, bad}), UsageError) << bad;
  for (const double bad : {1.0, 0.0, -0.5, nan})
    EXPECT_THROW(LossScale({ScaleKind::kDynamic, 16, 2, bad}), UsageError) << bad;
  EXPECT_THROW(LossScale({ScaleKind::kDynamic, 16, 2, 0.5, 0}), UsageError);
}

}  // namespace
}  // namespace isoshard
