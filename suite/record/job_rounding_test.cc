// SPDX-License-Identifier: Apache-2.0
/// What is said of processes that round otherwise.
#include "suite/record/job_rounding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fixtures/oracle/arithmetic_digest.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {
namespace {

/// Processes of two hosts that got unlike results.
class UnlikeHosts final : public Launcher, public Peers {
 public:
  [[nodiscard]] std::string_view name() const noexcept override { return "unlike"; }
  [[nodiscard]] bool shares_memory() const noexcept override { return false; }
  [[nodiscard]] Peers* peers() noexcept override { return this; }
  [[nodiscard]] std::unique_ptr<RunningWorld> launch(WorldOptions, Body) override { return {}; }

  [[nodiscard]] int index() const noexcept override { return 0; }
  [[nodiscard]] int count() const noexcept override { return 2; }
  void broadcast(std::span<std::byte>, int) override {}
  [[nodiscard]] std::int64_t sum(std::int64_t own) override { return own; }
  void gather(std::span<const std::byte>, std::span<std::byte>) override {}
  [[nodiscard]] const Hosts& hosts() const noexcept override { return hosts_; }
  [[nodiscard]] const std::shared_ptr<MemoryPool>& memory() const noexcept override {
    return none_;
  }
  void broadcast_in_host(std::span<std::byte>) override {}
  void broadcast_to_hosts(std::span<std::byte>, int) override {}
  void send(std::span<const std::byte>, int) override {}
  void receive(std::span<std::byte>, int) override {}
  void add_difference(std::string sentence) override { sentences_.push_back(std::move(sentence)); }
  [[nodiscard]] std::vector<std::string> take_differences() override {
    return std::exchange(sentences_, {});
  }

 private:
  Hosts hosts_{{0, 1}, {0, 1}, {1, 1}, {"a", "b"}};
  std::shared_ptr<MemoryPool> none_;
  std::vector<std::string> sentences_;
};

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(JobRounding, OfEqualDigestsIsThatDigest) {
  const JobRounding rounding = job_rounding({{7, "a", "x"}, {7, "b", "y"}});

  EXPECT_EQ(rounding.digest, 7U);
  EXPECT_EQ(rounding.difference, "");
}

TEST(JobRounding, NamesEveryHostThatRoundsOtherwise) {
  const JobRounding rounding =
      job_rounding({{7, "a", "x"}, {8, "b", "y"}, {7, "a", "x"}, {8, "b", "y"}, {9, "c", "z"}});

  EXPECT_EQ(rounding.digest, 0U);
  EXPECT_THAT(rounding.difference,
              AllOf(HasSubstr("ranks 1, 3 on b (y, arithmetic digest 0000000000000008)"),
                    HasSubstr("rank 4 on c (z,"), HasSubstr("rank 0 on a (x, 0000000000000007)"),
                    Not(HasSubstr("rank 2 "))));
}

TEST(JobRounding, OfOneProcessIsItsOwn) {
  EXPECT_EQ(rounding_of_job(forked_launcher()).digest, arithmetic_digest());
}

TEST(JobRounding, OfEqualDigestsAndUnlikeResultsIsAFinding) {
  ASSERT_EQ(rounding_of_job(forked_launcher()).difference, "");
  UnlikeHosts hosts;
  EXPECT_THAT(unequal_runs_of_hosts(hosts), testing::IsEmpty());
  hosts.add_difference("qwen2 on b (rank 1) is not that on a (rank 0)");

  EXPECT_THAT(
      unequal_runs_of_hosts(hosts),
      testing::ElementsAre(AllOf(
          HasSubstr("a result that cannot be repeated: qwen2 on b (rank 1) is not that on a"),
          HasSubstr("all CPUs round alike (arithmetic digest"), HasSubstr("rank 0 was taken"))));
  EXPECT_THAT(unequal_runs_of_hosts(hosts), testing::IsEmpty()) << "told once";
  EXPECT_THAT(unequal_runs_of_hosts(forked_launcher()), testing::IsEmpty());
}

}  // namespace
}  // namespace isoshard
