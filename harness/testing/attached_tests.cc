// SPDX-License-Identifier: Apache-2.0
/// What the processes of a job agree on before and after their tests.
#include "harness/testing/attached_tests.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "harness/world/attached/last_words.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {
namespace {

constexpr int kInfrastructure = 4;
constexpr std::string_view kAttach = "--attach", kExpected = "--expect-world-size=";

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

/// Marks the running test as skipped and leaves it.
[[noreturn]] void skip(const std::string& reason) {
  [&] { GTEST_SKIP() << reason; }();
  throw testing::AssertionException(
      testing::TestPartResult(testing::TestPartResult::kSkip, __FILE__, __LINE__, reason.c_str()));
}

int number_of(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 1)
    throw UsageError(fmt::format("{} must be a number of ranks, got '{}'", kExpected, text));
  return number;
}

/// Names and flags, by which processes would go other ways.
std::string selected_tests() {
  std::string names = fmt::format("{} {} {} {}", GTEST_FLAG_GET(filter), GTEST_FLAG_GET(repeat),
                                  GTEST_FLAG_GET(shuffle), GTEST_FLAG_GET(random_seed));
  for (const char* variable : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) {
    const char* const value = std::getenv(variable);
    names += fmt::format(" {}", value == nullptr ? "" : value);
  }
  const auto& unit_test = *testing::UnitTest::GetInstance();
  for (int i = 0; i < unit_test.total_test_suite_count(); ++i) {
    const auto& suite = *unit_test.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j)
      names += fmt::format(" {}.{}", suite.name(), suite.GetTestInfo(j)->name());
  }
  return names;
}

}  // namespace

class AttachedTests::FittingWorlds final : public Launcher {
 public:
  FittingWorlds(AttachedLauncher& inner, int most) : inner_(inner), most_(most) {}
  [[nodiscard]] std::string_view name() const noexcept override { return inner_.name(); }
  [[nodiscard]] bool shares_memory() const noexcept override { return inner_.shares_memory(); }
  [[nodiscard]] Peers* peers() noexcept override { return inner_.peers(); }
  [[nodiscard]] std::unique_ptr<RunningWorld> launch(WorldOptions options, Body body) override {
    if (options.size > most_) {
      skip(fmt::format("a world of {} ranks, and mpirun started {}; start more with -n",
                       options.size, most_));
    }
    if (options.transport.make) {
      skip(fmt::format("a world on transport {}, and attached ranks talk through mpi",
                       name_of(options.transport.backend)));
    }
    num_worlds_ += options.size > 1 ? 1 : 0;
    return inner_.launch(std::move(options), [body = std::move(body)](Rank& rank) {
      const bool was_skipped = testing::Test::IsSkipped();
      body(rank);
      if (!was_skipped && testing::Test::IsSkipped())
        ADD_FAILURE() << "GTEST_SKIP() in a rank: skip before the world is started";
    });
  }
  [[nodiscard]] int num_worlds() const noexcept { return num_worlds_; }

 private:
  AttachedLauncher& inner_;
  int most_;
  int num_worlds_ = 0;
};

std::unique_ptr<AttachedTests> AttachedTests::join(int& argc, char** argv,
                                                   const AttachJob& attach_job) {
  bool attaches = false;
  int expected = 0, kept = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == kAttach) {
      attaches = true;
    } else if (argument.starts_with(kExpected)) {
      expected = number_of(argument.substr(kExpected.size()));
    } else {
      argv[kept++] = argv[i];
    }
  }
  argv[kept] = nullptr;
  argc = kept;
  if (!attaches) {
    if (expected != 0)
      throw UsageError(
          fmt::format("{}{} is for --attach; add it, or leave it out", kExpected, expected));
    return nullptr;
  }
  auto job = attach_job();
  if (expected != 0 && expected != job->size()) {
    throw UsageError(
        fmt::format("the attached world must have {} ranks ({}{}), got {}; start it with mpirun "
                    "-n {}",
                    expected, kExpected, expected, job->size(), expected));
  }
  return std::make_unique<AttachedTests>(std::move(job));
}

AttachedTests::AttachedTests(std::unique_ptr<AttachedJob> job) : job_(std::move(job)) {
  allow_threads_of_now();
  install_last_words(job_->rank(), job_->size());
  launcher_ = std::make_unique<AttachedLauncher>(*job_);
  fitting_ = std::make_unique<FittingWorlds>(*launcher_, job_->size());
  set_default_launcher(*fitting_);
}

AttachedTests::~AttachedTests() = default;

void AttachedTests::prepare() {
  if (GTEST_FLAG_GET(shuffle)) {
    constexpr std::uint64_t kMostSeed = 99'999;  // of GoogleTest
    auto seed = static_cast<std::uint64_t>(GTEST_FLAG_GET(random_seed));
    if (seed == 0) {
      const auto now = std::chrono::system_clock::now().time_since_epoch();
      seed = 1 + static_cast<std::uint64_t>(now.count()) / 1'000'000 % kMostSeed;
    }
    GTEST_FLAG_SET(random_seed, static_cast<std::int32_t>(job_->largest(seed)));
  }
  const std::uint64_t own = std::hash<std::string>{}(selected_tests());
  const std::uint64_t most = job_->largest(own), least = ~job_->largest(~own);
  if (most != least) {
    throw UsageError(
        "all processes must run the same tests, and these differ; give mpirun one program and one "
        "set of arguments");
  }
  if (job_->rank() == 0) return;
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  delete listeners.Release(listeners.default_xml_generator());
  listeners.Append(new FailuresOfRank(job_->rank()));
}

int AttachedTests::finish(int code) {
  const int num_worlds = fitting_->num_worlds();
  const bool is_shard = std::getenv("GTEST_TOTAL_SHARDS") != nullptr;
  if (num_worlds == 0 && !GTEST_FLAG_GET(list_tests) && !is_shard) {
    if (job_->rank() == 0)
      fmt::print(stderr, "no test of this program had a world of 2 to {} ranks\n", job_->size());
    code = kInfrastructure;
  }
  (void)launcher_->ended_together("");
  const auto all = static_cast<int>(job_->largest(static_cast<std::uint64_t>(code)));
  if (job_->rank() == 0)
    fmt::print("{} worlds on the {} processes of mpirun\n", num_worlds, job_->size());
  job_->finish();
  return all;
}

}  // namespace isoshard
