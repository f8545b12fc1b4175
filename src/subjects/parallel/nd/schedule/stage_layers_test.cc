// SPDX-License-Identifier: Apache-2.0
// Layers of stages: nearly equal, or as given; misfits are refused with the numbers.
#include "subjects/parallel/nd/schedule/stage_layers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

TEST(StageLayers, AreNearlyEqualOrAsGiven) {
  EXPECT_THAT(layers_of_stages(7, 3), ElementsAre(3, 2, 2));
  EXPECT_THAT(layers_of_stages(7, 3, std::vector<std::int64_t>{1, 2, 4}), ElementsAre(1, 2, 4));
}

TEST(StageLayers, ThatDoNotFitAreRefusedWithTheNumbers) {
  const auto given = [](std::vector<std::int64_t> counts) {
    return [counts = std::move(counts)] { (void)layers_of_stages(7, 3, counts); };
  };
  EXPECT_THAT(given({3, 4}), ThrowsMessage<UsageError>(HasSubstr("3 numbers")));
  EXPECT_THAT(given({3, 2, 1}), ThrowsMessage<UsageError>(HasSubstr("3,2,1 with the sum 6")));
  EXPECT_THAT(given({3, 0, 4}), ThrowsMessage<UsageError>(HasSubstr("from 1 to the 7")));
  EXPECT_THAT(given({INT64_MAX, INT64_MAX, 9}), ThrowsMessage<UsageError>(HasSubstr("from 1 to")))
      << "whose sum would overflow to 7";
  EXPECT_THAT([] { (void)layers_of_stages(2, 3); },
              ThrowsMessage<UsageError>(HasSubstr("from 1 to the 2 layers of the model, got 3")));
}

TEST(StageLayers, AreReadAsTheyAreWritten) {
  EXPECT_THAT(parse_layers_per_stage("3,2,11"), ElementsAre(3, 2, 11));
  EXPECT_THAT(parse_layers_per_stage(""), IsEmpty());
  EXPECT_EQ(layers_per_stage_text(std::vector<std::int64_t>{3, 2, 11}), "3,2,11");
  for (const char* const text : {"3,", ",3", "3;2", "x", "3,,2", " 3"}) {
    EXPECT_THAT([&] { (void)parse_layers_per_stage(text); },
                ThrowsMessage<UsageError>(HasSubstr(text)))
        << text;
  }
}

}  // namespace
}  // namespace isoshard
