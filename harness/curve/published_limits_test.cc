// SPDX-License-Identifier: Apache-2.0
// The limits printed in seeds/001, and that each can be broken.
#include "harness/curve/published_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>

namespace isoshard {
namespace {

constexpr std::array<SubjectCurveLimits, 2> kLimits{
    {{"fsdp_tp", 0.02, 0.001}, {"autotp", 0.5, 0.15}}};

Curve curve(const std::string& subject, double offset = 0) {
  Curve made;
  made.subject = subject;
  for (int step = 0; step < 100; ++step)
    made.steps.push_back({step, 10.0 - 0.05 * step + offset, {}, 1, kPublishedLearningRate});
  return made;
}

std::vector<std::string> broken(const Curve& reference, const Curve& actual) {
  std::vector<std::string> words;
  for (const CurveLimit& limit : published_limits(reference, actual, kLimits)) {
    if (!limit.holds) words.push_back(limit.what);
  }
  return words;
}

// The three numbers as printed for the published runs.
TEST(PublishedLimits, AreTheThreePrintedNumbersOfTheTwoSystems) {
  const Curve ddp = curve("ddp");
  Curve fsdp = curve("fsdp_tp"), autotp = curve("autotp");
  fsdp.steps[50].loss += 0.019137;
  autotp.steps[50].loss -= 0.456453;

  const std::vector<CurveLimit> of_fsdp = published_limits(ddp, fsdp, kLimits),
                                of_autotp = published_limits(ddp, autotp, kLimits);

  ASSERT_EQ(of_fsdp.size(), 3U);
  EXPECT_EQ(of_fsdp[0].limit, 0.001);
  EXPECT_NEAR(of_fsdp[1].measured, 0.019137, 1e-12);
  EXPECT_NEAR(of_fsdp[2].measured, 0.00019137, 1e-12);
  EXPECT_NEAR(of_autotp[1].measured, 0.456453, 1e-12);
  EXPECT_EQ(of_autotp[2].limit, 0.15);
  EXPECT_TRUE(broken(ddp, fsdp).empty() && broken(ddp, autotp).empty());
  EXPECT_TRUE(published_limits(ddp, curve("megatron", 9), kLimits).empty());
}

TEST(PublishedLimits, EachBreaksAlone) {
  using testing::ElementsAre;
  const Curve ddp = curve("ddp");
  Curve first = curve("fsdp_tp"), one = first, all = curve("fsdp_tp", 0.00101), nan = first;
  first.steps[0].loss += 0.0011;
  one.steps[99].loss -= 0.021;
  all.steps[0].loss = ddp.steps[0].loss;
  all.steps[1].loss += 0.002;
  nan.steps[7].loss = std::nan("");

  EXPECT_THAT(broken(ddp, first), ElementsAre("initial loss"));
  EXPECT_THAT(broken(ddp, one), ElementsAre("largest difference"));
  EXPECT_THAT(broken(ddp, all), ElementsAre("mean difference"));
  EXPECT_THAT(broken(ddp, nan), ElementsAre("largest difference", "mean difference"));
  EXPECT_THAT(broken(ddp, curve("autotp", 0.16)), ElementsAre("initial loss", "mean difference"));
}

TEST(PublishedLimits, AreOfMeansFromTheFirstStepOnAndHeldAtThePublishedRate) {
  Curve ddp = curve("ddp"), run = curve("autotp", 1);
  EXPECT_TRUE(are_held(run));
  run.steps[3].learning_rate = 1.1e-5;
  EXPECT_FALSE(are_held(run));
  EXPECT_THAT(limits_in_words(published_limits(ddp, run, kLimits), false),
              testing::AllOf(testing::HasSubstr("mean difference 1 (below 0.15: BROKEN)"),
                             testing::HasSubstr("not held above a learning rate of 1e-05")));
  run.settings = R"({"loss_mean": "sum"})";
  EXPECT_TRUE(published_limits(ddp, run, kLimits).empty());
  run = curve("autotp");
  run.steps.erase(run.steps.begin());
  EXPECT_TRUE(published_limits(ddp, run, kLimits).empty());
}

}  // namespace
}  // namespace isoshard
