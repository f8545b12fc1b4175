// SPDX-License-Identifier: Apache-2.0
/// The main of test programs that mpirun starts: mpirun -n 4 PROGRAM --expect-world-size=4.
///
/// Every rank runs the same tests in the same order. Rank 0 prints and writes the report; other
/// ranks print their failures only. The program fails on every rank if a test failed on any.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <string_view>

#include "core/base/error.h"
#include "core/comm/mpi/mpi_job.h"
#include "suite/testing/mpi_test_world.h"

namespace isoshard {
namespace {

constexpr int kNothingRan = 2, kInfrastructure = 4;
constexpr std::string_view kExpected = "--expect-world-size=";

class FailuresOfRank final : public testing::EmptyTestEventListener {
 public:
  explicit FailuresOfRank(int rank) : rank_(rank) {}
  void OnTestStart(const testing::TestInfo& test) override {
    test_ = fmt::format("{}.{}", test.test_suite_name(), test.name());
  }
  // GoogleTest holds its lock here: asking it for the current test would wait for ever.
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    fmt::print(stderr, "rank {}: {}: {}:{}: {}\n", rank_, test_,
               result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
               result.message());
  }

 private:
  int rank_;
  std::string test_ = "before the first test";
};

int expected_size(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with(kExpected)) return std::atoi(argument.substr(kExpected.size()).data());
  }
  throw UsageError(fmt::format(
      "the arguments must name the size of the world, got none; give {}RANKS", kExpected));
}

/// A rank with another filter would wait for the others for ever.
void check_equal_tests() {
  std::string names;
  const auto& unit_test = *testing::UnitTest::GetInstance();
  for (int i = 0; i < unit_test.total_test_suite_count(); ++i) {
    const auto& suite = *unit_test.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j)
      names += fmt::format("{}.{} ", suite.name(), suite.GetTestInfo(j)->name());
  }
  for (const std::string& flag :
       {GTEST_FLAG_GET(filter),
        fmt::format("{} {} {}", GTEST_FLAG_GET(repeat), GTEST_FLAG_GET(shuffle),
                    GTEST_FLAG_GET(random_seed))}) {
    names += flag + " ";
  }
  const auto hash = static_cast<long long>(std::hash<std::string>{}(names) >> 2);
  long long own[2] = {hash, -hash}, most[2] = {};
  check_mpi(MPI_Allreduce(own, most, 2, MPI_LONG_LONG, MPI_MAX, MPI_COMM_WORLD), "MPI_Allreduce");
  if (most[0] != -most[1]) {
    throw UsageError(
        "all ranks must run the same tests, and these differ; give every rank the same program and "
        "arguments");
  }
}

int run(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  MpiTestWorld::attach(expected_size(argc, argv));
  const int rank = MpiTestWorld::attached_rank();
  if (GTEST_FLAG_GET(shuffle)) {
    int seed = GTEST_FLAG_GET(random_seed);
    if (seed == 0) seed = 1 + static_cast<int>(MPI_Wtime()) % 99'999;
    check_mpi(MPI_Bcast(&seed, 1, MPI_INT, 0, MPI_COMM_WORLD), "MPI_Bcast");
    GTEST_FLAG_SET(random_seed, seed);
  }
  check_equal_tests();
  if (rank != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOfRank(rank));
    GTEST_FLAG_SET(output, "");
    delete listeners.Release(listeners.default_xml_generator());
  }
  int own = RUN_ALL_TESTS(), code = 0;
  if (own == 0 && MpiTestWorld::num_runs() == 0) {
    fmt::print(stderr, "no test of this program had a world of {} ranks\n",
               MpiTestWorld::attached_size());
    own = kNothingRan;
  }
  check_mpi(MPI_Allreduce(&own, &code, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD), "MPI_Allreduce");
  if (rank == 0)
    fmt::print("{} runs on worlds of {} ranks\n", MpiTestWorld::num_runs(),
               MpiTestWorld::attached_size());
  return code;
}

}  // namespace
}  // namespace isoshard

int main(int argc, char** argv) {
  try {
    return isoshard::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return isoshard::kInfrastructure;
  }
}
