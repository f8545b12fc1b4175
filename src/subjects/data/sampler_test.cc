// SPDX-License-Identifier: Apache-2.0
// The split of samples over dp: exact ids, each once, at every size; padding, resuming, refusals.
#include "subjects/data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "core/base/error.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Ids = std::vector<std::int64_t>;

// All ranks' samples of `batches` global batches from `first` on, in dp order.
Ids taken(const Sampler& sampler, int dp, std::int64_t first, std::int64_t batches) {
  Ids ids;
  for (std::int64_t k = first; k < first + batches; ++k) {
    for (int d = 0; d < dp; ++d) {
      const Ids own = sampler.samples(k, d);
      ids.insert(ids.end(), own.begin(), own.end());
    }
  }
  return ids;
}

TEST(ContiguousSampler, CoversEachBatchOnceInOrder) {
  const ContiguousSampler sampler(3, 2);

  EXPECT_THAT(sampler.samples(0, 0), ElementsAre(0, 1));
  EXPECT_THAT(sampler.samples(0, 2), ElementsAre(4, 5));
  EXPECT_THAT(taken(sampler, 3, 1, 2), ElementsAre(6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17));
}

TEST(ContiguousSampler, RefusesWhatNoRankCanHave) {
  EXPECT_THROW((void)ContiguousSampler(2, 1).samples(0, 2), UsageError);
  EXPECT_THROW((void)ContiguousSampler(2, 1).samples(-1, 0), UsageError);
  EXPECT_THROW(ContiguousSampler(2, 0), UsageError);
  EXPECT_THROW(ContiguousSampler(0, 1), UsageError);
}

// Every dp degree with sizes that divide, do not divide, and are below the number of ranks.
struct Sizes {
  int dp;
  std::int64_t batch_size, num_samples;
};
class EpochSplit : public ::testing::TestWithParam<Sizes> {
 protected:
  [[nodiscard]] static EpochSamplerSettings settings(TailPolicy tail) {
    const Sizes& sizes = GetParam();
    return {.num_samples = sizes.num_samples,
            .dp_degree = sizes.dp,
            .batch_size = sizes.batch_size,
            .shuffle = true,
            .seed = 7,
            .tail = tail};
  }
  [[nodiscard]] static std::int64_t unit() { return GetParam().dp * GetParam().batch_size; }
};

TEST_P(EpochSplit, PadGivesEachIdOnceAndThenTheFirstOnesAgain) {
  const EpochSamplerSettings given = settings(TailPolicy::kPad);
  const EpochSampler sampler(given);
  const std::int64_t batches = (given.num_samples + unit() - 1) / unit();

  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    const Ids ids = taken(sampler, given.dp_degree, epoch * batches, batches);

    const Ids order = sampler.order_of(epoch);
    ASSERT_EQ(static_cast<std::int64_t>(ids.size()), batches * unit());
    EXPECT_EQ(std::set<std::int64_t>(order.begin(), order.end()).size(),
              static_cast<std::size_t>(given.num_samples));
    for (std::size_t i = 0; i < ids.size(); ++i)
      EXPECT_EQ(ids[i], order[i % order.size()]) << "epoch " << epoch << ", place " << i;
  }
}

TEST_P(EpochSplit, DropGivesEachIdAtMostOnceAndLeavesLessThanABatch) {
  const EpochSamplerSettings given = settings(TailPolicy::kDrop);
  if (given.num_samples < unit()) {
    EXPECT_THAT([&] { EpochSampler{given}; },
                ThrowsMessage<UsageError>(AllOf(HasSubstr(std::to_string(given.num_samples)),
                                                HasSubstr(std::to_string(unit())))));
    return;
  }
  const EpochSampler sampler(given);
  const std::int64_t batches = given.num_samples / unit();

  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    const Ids ids = taken(sampler, given.dp_degree, epoch * batches, batches);

    EXPECT_EQ(std::set<std::int64_t>(ids.begin(), ids.end()).size(), ids.size());
    EXPECT_LT(given.num_samples - static_cast<std::int64_t>(ids.size()), unit());
  }
}

TEST_P(EpochSplit, ErrorRefusesARestAndNamesIt) {
  const EpochSamplerSettings given = settings(TailPolicy::kError);
  const std::int64_t rest = given.num_samples % unit();
  if (rest == 0) {
    EXPECT_EQ(taken(EpochSampler(given), given.dp_degree, 0, given.num_samples / unit()),
              EpochSampler(given).order_of(0));
    return;
  }
  EXPECT_THAT([&] { EpochSampler{given}; },
              ThrowsMessage<UsageError>(HasSubstr(std::to_string(rest) + " are left over")));
}

TEST_P(EpochSplit, ResumedItGoesOnWhereItStopped) {
  const EpochSamplerSettings given = settings(TailPolicy::kPad);
  const EpochSampler sampler(given);
  for (std::int64_t stop = 0; stop < 7; ++stop) {
    EpochSamplerSettings later = given;
    later.start = sampler.position_after(stop);

    const EpochSampler resumed(later);

    EXPECT_EQ(taken(resumed, given.dp_degree, 0, 5), taken(sampler, given.dp_degree, stop, 5))
        << "after " << stop;
    EXPECT_EQ(resumed.position_after(2), sampler.position_after(stop + 2));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, EpochSplit,
                         ::testing::Values(Sizes{1, 1, 7}, Sizes{1, 2, 7}, Sizes{2, 1, 8},
                                           Sizes{2, 2, 13}, Sizes{3, 1, 13}, Sizes{3, 2, 12},
                                           Sizes{5, 1, 3}, Sizes{5, 2, 3}, Sizes{5, 1, 11},
                                           Sizes{3, 1, 1}, Sizes{2, 3, 101}),
                         [](const auto& sizes) {
                           return "dp" + std::to_string(sizes.param.dp) + "_b" +
                                  std::to_string(sizes.param.batch_size) + "_n" +
                                  std::to_string(sizes.param.num_samples);
                         });

TEST(EpochSampler, UnshuffledHasTheExactIdsOfTheContract) {
  const EpochSampler sampler({.num_samples = 7, .dp_degree = 3, .batch_size = 1});

  EXPECT_THAT(taken(sampler, 3, 0, 3), ElementsAre(0, 1, 2, 3, 4, 5, 6, 0, 1));
  EXPECT_THAT(taken(sampler, 3, 3, 1), ElementsAre(0, 1, 2));
}

TEST(EpochSampler, ShuffledHasTheExactIdsOfTheContract) {
  const EpochSampler sampler({.num_samples = 10,
                              .dp_degree = 2,
                              .batch_size = 2,
                              .shuffle = true,
                              .tail = TailPolicy::kDrop});

  EXPECT_THAT(sampler.order_of(0), ElementsAre(1, 7, 6, 9, 4, 0, 2, 8, 3, 5));
  EXPECT_THAT(sampler.order_of(1), ElementsAre(9, 5, 0, 1, 8, 7, 3, 6, 4, 2));
}

// In a run each rank asks a sampler of its own.
TEST(EpochSampler, GivesARankTheSameWhoeverElseAsks) {
  const EpochSamplerSettings settings{
      .num_samples = 11, .dp_degree = 3, .batch_size = 2, .shuffle = true, .seed = 5};
  constexpr std::int64_t kBatches = 8;
  const Ids all = taken(EpochSampler(settings), settings.dp_degree, 0, kBatches);
  for (int rank = 0; rank < settings.dp_degree; ++rank) {
    const EpochSampler own(settings);
    for (std::int64_t batch = 0; batch < kBatches; ++batch) {
      const auto first = all.begin() + (batch * settings.dp_degree + rank) * settings.batch_size;
      EXPECT_EQ(own.samples(batch, rank), Ids(first, first + settings.batch_size))
          << rank << " " << batch;
    }
  }
}

TEST(EpochSampler, MoreRanksThanSamplesRepeatThemOverAndOver) {
  const EpochSampler sampler({.num_samples = 2, .dp_degree = 5, .batch_size = 1});

  EXPECT_THAT(taken(sampler, 5, 0, 1), ElementsAre(0, 1, 0, 1, 0));
  EXPECT_EQ(sampler.position_after(1), (SamplerPosition{1, 0}));
}

TEST(EpochSampler, EpochsAndSeedsHaveOrdersOfTheirOwn) {
  const EpochSampler sampler({.num_samples = 50, .shuffle = true, .seed = 1});
  const EpochSampler other({.num_samples = 50, .shuffle = true, .seed = 2});

  EXPECT_NE(sampler.order_of(0), sampler.order_of(1));
  EXPECT_NE(sampler.order_of(0), other.order_of(0));
  EXPECT_FALSE(std::ranges::is_sorted(sampler.order_of(0)));
}

// Each of 4 samples stands at each of 4 places about equally often: 4000 orders, so 1000 +- 150
// (5.5 standard deviations of 27).
TEST(EpochSampler, EverySampleMayComeToEveryPlace) {
  const EpochSampler sampler({.num_samples = 4, .shuffle = true});
  std::map<std::pair<std::size_t, std::int64_t>, int> counts;
  for (std::int64_t epoch = 0; epoch < 4000; ++epoch) {
    const Ids order = sampler.order_of(epoch);
    for (std::size_t place = 0; place < order.size(); ++place) ++counts[{place, order[place]}];
  }

  ASSERT_EQ(counts.size(), 16U);
  for (const auto& [where, count] : counts)
    EXPECT_NEAR(count, 1000, 150) << "place " << where.first << ", sample " << where.second;
}

TEST(EpochSampler, ResumesWithAnotherDpDegreeBehindWhatWasTaken) {
  const EpochSamplerSettings two{
      .num_samples = 12, .dp_degree = 2, .batch_size = 1, .shuffle = true, .seed = 3};
  const EpochSampler before(two);
  EpochSamplerSettings four = two;
  four.dp_degree = 4;
  four.start = before.position_after(2);

  Ids ids = taken(before, 2, 0, 2);
  const Ids rest = taken(EpochSampler(four), 4, 0, 2);
  ids.insert(ids.end(), rest.begin(), rest.end());

  EXPECT_EQ(four.start, (SamplerPosition{0, 4}));
  EXPECT_EQ(ids, before.order_of(0));
}

TEST(EpochSampler, RefusesStartsOutsideTheData) {
  const auto start_at = [](std::int64_t epoch, std::int64_t position) {
    return [=] { EpochSampler({.num_samples = 4, .start = {epoch, position}}); };
  };

  EXPECT_THAT(start_at(0, 5), ThrowsMessage<UsageError>(HasSubstr("from 0 to 4, got 0 and 5")));
  EXPECT_THROW(start_at(-1, 0)(), UsageError);
  EXPECT_NO_THROW(start_at(3, 4)());
  EXPECT_THROW(EpochSampler({.num_samples = 0}), UsageError);
}

TEST(TailPolicy, NamesAreReadBackAndUnknownOnesSuggestAKnownOne) {
  for (const TailPolicy policy : {TailPolicy::kDrop, TailPolicy::kPad, TailPolicy::kError}) {
    EXPECT_EQ(parse_tail_policy(name_of(policy)), policy);
  }
  EXPECT_THAT([] { (void)parse_tail_policy("dorp"); },
              ThrowsMessage<UsageError>(HasSubstr("did you mean 'drop'")));
}

}  // namespace
}  // namespace isoshard
