// SPDX-License-Identifier: Apache-2.0
/// What is said of hosts that differ, and what ranks measure.
#include "app/cluster/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "app/cluster/probe.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr std::int64_t kGib = std::int64_t{1} << 30;

/// Ranks 0 and 1 on node1, 2 and 3 on node2; nothing wrong.
Cluster two_hosts() {
  const HostFacts facts{.host = "node1",
                        .cpu = "AMD EPYC",
                        .cores = 4,
                        .memory_bytes = 16 * kGib,
                        .available_bytes = 12 * kGib,
                        .shm_bytes = 8 * kGib,
                        .arithmetic = "13ebf250fc0cbd41",
                        .program = "0123456789abcdef",
                        .libtorch = "2.11.0",
                        .mpi = "Open MPI v4.1.4"};
  Cluster cluster{.ranks = {facts, facts, facts, facts}, .clocks = {{2, 3.5, 0.25}}, .links = {}};
  cluster.ranks[2].host = cluster.ranks[3].host = "node2";
  cluster.links = {{0, 2, 30, 110}, {0, 1, 1, 4000}, {2, 3, 1, 3000}};
  return cluster;
}

TEST(ClusterTable, HasALineForEachHostAndLink) {
  const std::string table = cluster_table(two_hosts());

  EXPECT_THAT(table, AllOf(HasSubstr("node1  0, 1"), HasSubstr("node2  2, 3"),
                           HasSubstr("+3.5 +- 0.2 ms"), HasSubstr("13ebf250fc0c")));
  EXPECT_THAT(table, AllOf(HasSubstr("node1 - node2  0, 2   30.0 us  110.0 MiB/s"),
                           HasSubstr("within node2   2, 3   1.0 us   2.9 GiB/s")));
}

TEST(ClusterTable, TellsHostsOfOneNameApart) {
  EXPECT_THAT(host_labels({"node1", "node2", "node1"}),
              ElementsAre("node1 (1)", "node2", "node1 (2)"));
}

TEST(ClusterTable, OfManyLinksShowsTheSlowest) {
  Cluster cluster = two_hosts();
  for (int i = 0; i < 20; ++i) cluster.links.push_back({1, 3, 30, 200.0 + i});
  cluster.links.push_back({1, 2, 30, 42});

  const std::string table = cluster_table(cluster);

  EXPECT_THAT(table, AllOf(HasSubstr("42.0 MiB/s"), Not(HasSubstr("219.0 MiB/s")),
                           HasSubstr("and 12 faster links")));
}

TEST(ClusterFindings, OfEqualHostsThereAreNone) {
  EXPECT_THAT(cluster_findings(two_hosts()), IsEmpty());
}

struct Difference {
  const char* name;
  std::function<void(Cluster&)> plant;
  const char* says;
  const char* advises;
};

class ClusterFindings : public testing::TestWithParam<Difference> {};

TEST_P(ClusterFindings, NameHostAndRemedy) {
  Cluster cluster = two_hosts();
  GetParam().plant(cluster);

  EXPECT_THAT(cluster_findings(cluster),
              ElementsAre(AllOf(HasSubstr(GetParam().says), HasSubstr(GetParam().advises))));
}

INSTANTIATE_TEST_SUITE_P(
    Each, ClusterFindings,
    testing::Values(
        Difference{"Program", [](Cluster& c) { c.ranks[3].program = "ffff"; },
                   "node2 (rank 3) has another isoshard", "put the same program on every host"},
        Difference{"Libtorch",
                   [](Cluster& c) { c.ranks[2].libtorch = c.ranks[3].libtorch = "2.10.0"; },
                   "node2 (ranks 2, 3) has another LibTorch: 2.10.0, where node1 has 2.11.0",
                   "install the same LibTorch"},
        Difference{"Mpi", [](Cluster& c) { c.ranks[2].mpi = "Open MPI v5.0.1"; },
                   "another MPI: Open MPI v5.0.1", "install the same MPI"},
        Difference{"Arithmetic", [](Cluster& c) { c.ranks[2].arithmetic = "aaaa"; },
                   "a CPU that rounds otherwise", "within tolerances"},
        Difference{"Clock", [](Cluster& c) { c.clocks[0].ahead_ms = -2000; },
                   "got one 2.0 s behind", "chronyd"},
        Difference{"Shm", [](Cluster& c) { c.ranks[2].shm_bytes = std::int64_t{1} << 20; },
                   "/dev/shm of node2 must have 0.03 GiB for its 2 ranks", "--shm-size"},
        Difference{"Memory", [](Cluster& c) { c.ranks[2].available_bytes = kGib; },
                   "node2 must have 2.0 GiB of memory available, got 1.0 GiB", "another host"},
        Difference{"Link",
                   [](Cluster& c) {
                     c.links.push_back({1, 3, 30, 5});
                   },
                   "node1 - node2 must be about as fast as the best link of its kind, 110.0 MiB/s, "
                   "got 5.0 MiB/s",
                   "btl_tcp_if_include"}),
    [](const auto& difference) { return std::string(difference.param.name); });

// A clock that is known badly is not called wrong.
TEST(ClusterFindings, AClockWithinItsErrorIsNoDifference) {
  Cluster cluster = two_hosts();
  cluster.clocks[0] = {2, 2000, 1900};
  EXPECT_THAT(cluster_findings(cluster), IsEmpty());
}

TEST(ClusterProbe, MeasuresClocksAndLinksAndBringsFactsOfAllRanks) {
  HostFacts own = facts_of_this_host("none");
  own.host = "here";

  const Cluster cluster = probe_cluster(forked_launcher(), 3, own);

  ASSERT_EQ(cluster.ranks.size(), 3U);
  EXPECT_EQ(cluster.ranks[2].program, own.program);
  EXPECT_EQ(own.program.size(), 64U);
  EXPECT_EQ(own.arithmetic.size(), 16U);
  EXPECT_THAT(cluster.clocks, IsEmpty());  // one host has one clock
  ASSERT_EQ(cluster.links.size(), 1U);
  EXPECT_EQ(cluster.links[0].to, 1);
  EXPECT_GT(cluster.links[0].mib_per_s, 0);
  EXPECT_GT(cluster.links[0].latency_us, 0);
}

}  // namespace
}  // namespace isoshard
