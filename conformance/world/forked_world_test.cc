// SPDX-License-Identifier: Apache-2.0
/// What a forked world gives: fresh ranks, their values in order, their output, and nothing left
/// behind.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/comm/communicator.h"
#include "harness/testing/run_world.h"
#include "suite/testing/world_probes.h"

namespace isoshard {
namespace {

TEST(ForkedWorld, ReturnsOneValuePerRankInRankOrder) {
  for (const int size : {1, 2, 3, 4}) {
    const std::vector<double> sums = run_world(size, [&](Rank& rank) {
      EXPECT_EQ(rank.size(), size);
      EXPECT_EQ(rank.comm().size(), size);
      return summed(rank, 1 + rank.rank()) * 10 + rank.rank();
    });

    ASSERT_EQ(sums.size(), static_cast<std::size_t>(size));
    for (int rank = 0; rank < size; ++rank)
      EXPECT_EQ(sums[static_cast<std::size_t>(rank)], size * (size + 1) / 2 * 10 + rank);
  }
}

TEST(ForkedWorld, GivesBackStringsAndLargeVectors) {
  const std::vector<std::string> names =
      run_world(2, [](Rank& rank) { return "I am " + std::to_string(rank.rank()); });
  const std::vector<std::vector<float>> data = run_world(2, [](Rank& rank) {
    return std::vector<float>(3'000'000, static_cast<float>(rank.rank() + 1));
  });

  EXPECT_EQ(names, (std::vector<std::string>{"I am 0", "I am 1"}));
  EXPECT_EQ(data[0], std::vector<float>(3'000'000, 1.0F));
  EXPECT_EQ(data[1], std::vector<float>(3'000'000, 2.0F));
}

TEST(ForkedWorld, GivesEveryWorldFreshProcesses) {
  static int touched = 0;
  std::set<int> pids{static_cast<int>(::getpid())};
  for (int round = 0; round < 3; ++round) {
    for (const int pid :
         run_world(2, [](Rank&) { return touched++ == 0 ? static_cast<int>(::getpid()) : -1; }))
      pids.insert(pid);
  }

  EXPECT_EQ(pids.size(), 7U);
  EXPECT_EQ(pids.count(-1), 0U);
  EXPECT_EQ(touched, 0);
}

TEST(ForkedWorld, ServesSeveralWorldsAtOnce) {
  const Traces before = traces_of_process();
  {
    ForkedWorld first({.size = 2, .name = "first"}, [](Rank& rank) {
      detail::post_value(rank, std::vector<char>(1 << 20, 'a'));
    });
    ForkedWorld second({.size = 3, .name = "second"},
                       [](Rank& rank) { detail::post_value(rank, summed(rank, 1)); });
    const WorldReport second_report = second.wait();
    const WorldReport first_report = first.wait();

    EXPECT_TRUE(first_report.ok()) << first_report.describe();
    EXPECT_TRUE(second_report.ok()) << second_report.describe();
    EXPECT_EQ(first_report.ranks[1].result.size(), std::size_t{1} << 20);
    EXPECT_EQ(detail::value_of<double>(second_report.ranks[2].result), 3);
  }
  EXPECT_EQ(traces_of_process(), before);
}

TEST(ForkedWorld, EndsTheRanksOfAWorldNobodyWaitsFor) {
  const Traces before = traces_of_process();
  {
    const ForkedWorld world({.size = 2, .name = "given up"}, [](Rank&) { loop_for_ever(); });
  }
  EXPECT_EQ(traces_of_process(), before);
}

TEST(ForkedWorld, RanksHoldNoDescriptorOfTheirSiblings) {
  const std::vector<int> counts =
      run_world(4, [](Rank&) { return traces_of_process().descriptors; });

  for (const int count : counts) EXPECT_EQ(count, counts[0]);
}

TEST(ForkedWorld, KeepsHeadAndTailOfWhatRanksPrint) {
  // in the controller's buffer at the fork
  std::fputs("[of the controller, not of a rank]", stdout);
  const WorldReport report = run_world_report({.size = 2}, [](Rank& rank) {
    std::printf("first line of %d\n", rank.rank());
    const std::string line(9'999, 'x');
    if (rank.rank() == 1) {
      for (int i = 0; i < 10'000; ++i) std::puts(line.c_str());  // 100 MB
    }
    std::printf("last line of %d", rank.rank());
    std::fputs("to stderr", stderr);
  });

  ASSERT_TRUE(report.ok()) << report.describe();
  EXPECT_EQ(report.ranks[0].standard_output, "first line of 0\nlast line of 0");
  EXPECT_EQ(report.ranks[0].standard_error, "to stderr");
  const std::string& text = report.ranks[1].standard_output;
  EXPECT_LT(text.size(), 140'000U);
  EXPECT_TRUE(text.starts_with("first line of 1\nxxx"));
  EXPECT_TRUE(text.ends_with("xxx\nlast line of 1"));
  EXPECT_NE(text.find("bytes left out"), std::string::npos);
}

TEST(ForkedWorld, DecoratesTheCommunicatorOfEveryRank) {
  std::vector<int> decorated =
      run_world(WorldOptions{.size = 2,
                             .decorate =
                                 [](std::unique_ptr<Communicator> inner, int rank) {
                                   EXPECT_EQ(inner->rank(), rank);
                                   return inner->split(rank, 0);
                                 }},
                [](Rank& rank) { return rank.comm().size(); });

  EXPECT_EQ(decorated, (std::vector<int>{1, 1}));
}

TEST(ForkedWorld, RefusesSizesOutsideOneToSixteen) {
  EXPECT_THROW(run_world_report({.size = 0}, [](Rank&) {}), UsageError);
  EXPECT_THROW(run_world_report({.size = 17}, [](Rank&) {}), UsageError);
}

TEST(ForkedWorld, RanksComputeWithAtenAndWithMoreThreadsThanTheController) {
  const auto gradient_sum = [](at::ScalarType dtype) {
    const at::Tensor x = at::ones({64, 64}, at::TensorOptions().dtype(dtype)).requires_grad_();
    at::matmul(x, x).sum().backward();
    return x.grad().sum(at::kDouble).item<double>();
  };
  const std::vector<std::vector<double>> sums = run_world(2, [&](Rank& rank) {
    if (rank.rank() == 1) at::set_num_threads(2);
    return std::vector<double>{gradient_sum(at::kFloat), gradient_sum(at::kBFloat16)};
  });

  for (const auto& of_rank : sums)
    EXPECT_EQ(of_rank, (std::vector<double>{64 * 64 * 128, 64 * 64 * 128}));
}

TEST(ForkedWorld, RunsSixteenRanks) {
  const std::vector<double> sums = run_world(16, [](Rank& rank) { return summed(rank, 1); });

  EXPECT_EQ(sums, std::vector<double>(16, 16.0));
}

// ---- expectations in ranks
// -------------------------------------------------------------------------------------------------

struct Recorded {
  std::string file;
  int line;
  std::string text;
};

// The failures that `body` records in the running test, taken away from it.
std::vector<Recorded> failures_of(const std::function<void()>& body) {
  ::testing::TestPartResultArray results;
  {
    ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    body();
  }
  std::vector<Recorded> recorded;
  for (int i = 0; i < results.size(); ++i) {
    const ::testing::TestPartResult& result = results.GetTestPartResult(i);
    recorded.push_back({result.file_name() == nullptr ? "" : result.file_name(),
                        result.line_number(), result.message()});
  }
  return recorded;
}

TEST(ForkedWorld, ForwardsExpectationsWithRankAndPlace) {
  int line = 0;
  const auto failures = failures_of([&] {
    line = __LINE__ + 1;
    run_world(2, [](Rank& rank) { EXPECT_EQ(rank.rank(), 0) << "told by the rank"; });
  });

  ASSERT_EQ(failures.size(), 1U);
  EXPECT_TRUE(failures[0].text.starts_with("[rank 1] ")) << failures[0].text;
  EXPECT_NE(failures[0].text.find("told by the rank"), std::string::npos);
  EXPECT_TRUE(failures[0].file.ends_with("forked_world_test.cc")) << failures[0].file;
  EXPECT_EQ(failures[0].line, line);
}

TEST(ForkedWorld, FatalAssertionReleasesPeersAndIsOneFailure) {
  const auto failures = failures_of([&] {
    run_world(2, [](Rank& rank) {
      ASSERT_EQ(rank.rank(), 0) << "only on rank 1";
      summed(rank, 1);
    });
  });

  ASSERT_EQ(failures.size(), 1U) << failures[1].text;
  EXPECT_NE(failures[0].text.find("only on rank 1"), std::string::npos);
}

TEST(ForkedWorld, ExpectationsFailAReportTooAndPrintNothing) {
  const WorldReport report =
      run_world_report({.size = 2}, [](Rank& rank) { EXPECT_EQ(rank.rank(), 1); });

  EXPECT_FALSE(report.ok());
  EXPECT_EQ(report.ranks[0].failures.size(), 1U);
  EXPECT_EQ(report.ranks[0].standard_output, "");
  EXPECT_NE(report.describe().find("[rank 0]"), std::string::npos);
}

TEST(ForkedWorld, LostRankIsOneFailureAndEveryRankStillHasAnElement) {
  std::vector<int> values;
  const auto failures = failures_of([&] {
    values = run_world(3, [](Rank& rank) {
      if (rank.rank() == 1) throw std::runtime_error("boom");
      summed(rank, 1);
      return 7;
    });
  });

  ASSERT_EQ(failures.size(), 1U);
  EXPECT_NE(failures[0].text.find("rank 1 threw"), std::string::npos) << failures[0].text;
  EXPECT_NE(failures[0].text.find("boom"), std::string::npos);
  EXPECT_TRUE(failures[0].file.ends_with("forked_world_test.cc")) << failures[0].file;
  EXPECT_EQ(values, (std::vector<int>{0, 0, 0}));
}

}  // namespace
}  // namespace isoshard
