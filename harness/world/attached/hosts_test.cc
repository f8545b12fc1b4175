// SPDX-License-Identifier: Apache-2.0
/// Processes of two hosts: who runs what, what is held once, and hosts that disagree. Four
/// processes run these tests together, as if 0 and 1 ran on one host, and 2 and 3 on another.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/memory/memory_pool.h"
#include "core/system/leftovers.h"
#include "harness/run/trace_store.h"
#include "harness/world/attached/attached_launcher.h"
#include "harness/world/attached/hosts_of_job.h"
#include "harness/world/attached/last_words.h"
#include "harness/world/forked/forked_world.h"
#include "suite/testing/mpi_test_world.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

constexpr int kProcesses = 4;
constexpr std::size_t kMiB = std::size_t{1} << 20;

AttachedJob& job() {
  static const std::unique_ptr<AttachedJob> instance = [] {
    allow_threads_of_now();
    return attach_mpi_job();
  }();
  return *instance;
}

/// Of this process, for all tests: the order of worlds is the same on all.
AttachedLauncher& launcher() {
  static AttachedLauncher& instance = *new AttachedLauncher(job(), job().rank() < 2 ? "a" : "b");
  return instance;
}

Peers& peers() {
  return *launcher().peers();
}

bool is_on_b() {
  return job().rank() >= 2;
}

std::vector<std::byte> bytes_of(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

WorldReport run(WorldOptions options, const Launcher::Body& body) {
  return launcher().launch(std::move(options), body)->wait();
}

/// A number that forked ranks and their process see.
std::atomic<int>& shared_number() {
  static auto* const number = new (::mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                                          MAP_SHARED | MAP_ANONYMOUS, -1, 0)) std::atomic<int>(0);
  return *number;
}

/// Of /proc/self/status, in bytes.
std::size_t status_of_this(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(field + ":"))
      return std::strtoull(line.c_str() + field.size() + 1, nullptr, 10) << 10;
  }
  return 0;
}

/// Segments that are there under a name, of the process with this mark.
std::vector<std::string> segments_of(const std::string& mark) {
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename().string();
    if (name.find(".tmp." + mark + ".") != std::string::npos) found.push_back(name);
  }
  return found;
}

class HostsOfJobs : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(MpiTestWorld::attached_size(), kProcesses);
    // which counts runs, so that a program that ran nothing fails
    MpiTestWorld(kProcesses).run([](Communicator& comm) { comm.barrier({}); });
    (void)peers().take_differences();
  }
};

TEST_F(HostsOfJobs, AreProcessesOfOneNameAndOneMemory) {
  const Hosts& hosts = peers().hosts();

  EXPECT_THAT(hosts.host_of, ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(hosts.first, ElementsAre(0, 2));
  EXPECT_THAT(hosts.num_processes, ElementsAre(2, 2));
  EXPECT_THAT(hosts.names, ElementsAre("a", "b"));
  EXPECT_EQ(forks_ranks_here(launcher()), job().rank() % 2 == 0);
  ASSERT_NE(peers().memory(), nullptr);
  EXPECT_THAT(segments_of(maker_mark()), IsEmpty()) << "names are gone";
}

// containers_test.sh runs this with a /dev/shm for each two processes.
TEST_F(HostsOfJobs, OfOneNameAreAsManyAsThereAreMemories) {
  const char* const expected = std::getenv("ISOSHARD_EXPECTED_HOSTS");
  AttachedLauncher one_name(job(), "same");

  const Hosts& hosts = one_name.peers()->hosts();
  EXPECT_EQ(hosts.count(), expected == nullptr ? 1 : std::atoi(expected));
  if (hosts.count() == 1) {
    EXPECT_THAT(hosts.host_of, ElementsAre(0, 0, 0, 0));
  } else {
    EXPECT_THAT(hosts.host_of, ElementsAre(0, 0, 1, 1));
  }
}

TEST_F(HostsOfJobs, AProcessAloneNeedsNoCommonMemory) {
  AttachedLauncher alone(job(), std::to_string(job().rank()));

  EXPECT_EQ(alone.peers()->hosts().count(), kProcesses);
  EXPECT_EQ(alone.peers()->memory(), nullptr);
}

// As a process leaves one that is killed before all have opened its segment.
TEST_F(HostsOfJobs, WhatAKilledProcessLeftIsSweptAndWhatALivingOneHasIsNot) {
  std::string left;
  if (job().rank() == 0) {
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe(pipe.data()), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      const std::string name = "/isoshard-0123.tmp." + maker_mark() + ".0";
      (void)!::shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
      (void)!::write(pipe[1], name.data(), name.size());
      ::raise(SIGKILL);
    }
    std::array<char, 256> name{};
    const ssize_t size = ::read(pipe[0], name.data(), name.size());
    left.assign(name.data(), static_cast<std::size_t>(size));
    ::waitpid(child, nullptr, 0);
    ASSERT_TRUE(fs::exists("/dev/shm" + left));
  }
  const std::string own = "/isoshard-4567.tmp." + maker_mark() + ".0";
  ::close(::shm_open(own.c_str(), O_RDWR | O_CREAT, 0600));

  const AttachedLauncher next(job(), "same");

  if (job().rank() == 0) {
    EXPECT_FALSE(fs::exists("/dev/shm" + left));
  }
  EXPECT_THAT(segments_of(maker_mark()), ElementsAre(own.substr(1)));
  ::shm_unlink(own.c_str());
}

class WorldsOfOneOnHosts : public HostsOfJobs {};

TEST_F(WorldsOfOneOnHosts, RunOnceOnEachHostIfTheyMay) {
  for (const bool on_each_host : {false, true}) {
    shared_number() = 0;
    const WorldReport report =
        run({.size = 1, .name = "one", .on_each_host = on_each_host}, [](Rank& rank) {
          ++shared_number();
          rank.post_result(bytes_of("the same"));
        });

    ASSERT_TRUE(report.ok()) << report.describe();
    EXPECT_EQ(text_of(report.ranks.at(0).result), "the same");
    EXPECT_EQ(peers().sum(shared_number()), on_each_host ? 2 : 1);
    EXPECT_THAT(peers().take_differences(), IsEmpty());
  }
}

TEST_F(WorldsOfOneOnHosts, WhereTheyDifferTheFirstProcessesResultIsTakenAndItIsSaid) {
  const WorldReport report =
      run({.size = 1, .name = "plain", .on_each_host = true},
          [](Rank& rank) { rank.post_result(bytes_of(is_on_b() ? "planted" : "right")); });

  EXPECT_EQ(text_of(report.ranks.at(0).result), "right");
  EXPECT_THAT(peers().take_differences(),
              ElementsAre("plain on b (rank 2) is not that on a (rank 0)"));
  EXPECT_THAT(peers().take_differences(), IsEmpty());
}

TEST_F(WorldsOfOneOnHosts, ACrashOnAnyHostReachesAllProcesses) {
  for (const bool is_of_b : {false, true}) {
    const auto running =
        launcher().launch({.size = 1, .name = "plain", .on_each_host = true}, [&](Rank& rank) {
          rank.set_phase("computing");
          if (is_on_b() == is_of_b) ::raise(SIGKILL);
        });
    const WorldReport report = running->wait();

    EXPECT_FALSE(report.ok());
    EXPECT_THAT(report.describe(), HasSubstr("SIGKILL"));
    EXPECT_EQ(report.name, is_of_b ? "plain on b" : "plain");
  }
}

TEST_F(WorldsOfOneOnHosts, AnErrorOnAnyHostIsThrownEverywhere) {
  for (const bool is_of_b : {false, true}) {
    const auto running =
        launcher().launch({.size = 1, .name = "plain", .on_each_host = true}, [&](Rank&) {
          if (is_on_b() == is_of_b) throw FileError("weights.safetensors: planted");
        });
    EXPECT_THAT([&] { require_ok(running->wait()); },
                ThrowsMessage<FileError>(HasSubstr(is_of_b ? "planted on b" : "planted")));
  }
  const WorldReport next = run({.size = 1, .name = "next", .on_each_host = true}, [](Rank&) {});
  EXPECT_TRUE(next.ok()) << next.describe();
}

class KeptOnHosts : public HostsOfJobs {
 protected:
  /// What one rank keeps that each host runs, as all processes see it.
  std::shared_ptr<const Arena> kept_of(const std::function<std::vector<std::byte>()>& make) {
    const auto store = make_trace_store(launcher(), 1, 64 * kMiB, Sharing::kOnEachHost);
    const WorldReport report = run({.size = 1, .name = "keep", .on_each_host = true},
                                   [&](Rank&) { (void)store->of_rank(0)->append(make()); });
    EXPECT_TRUE(report.ok()) << report.describe();
    return store->kept_by(0);
  }
  static std::vector<std::byte> filled(std::size_t size, int value) {
    return std::vector<std::byte>(size, std::byte(value));
  }
};

// In private memory a process would have all of it.
TEST_F(KeptOnHosts, IsHeldOnceForAllProcessesOfAHost) {
  constexpr std::size_t kSize = 48 * kMiB;
  (void)kept_of([] { return filled(kSize, 1); });  // memory that is taken over
  const std::size_t before = peers().memory()->high_water();
  const std::size_t own_before = status_of_this("RssAnon");

  for (int round = 0; round < 3; ++round) {
    const auto kept = kept_of([&] { return filled(kSize, 65 + round); });

    ASSERT_EQ(kept->size(), kSize);
    EXPECT_EQ(kept->data()[0], std::byte(65 + round));
    EXPECT_EQ(kept->data()[kSize - 1], std::byte(65 + round));
    EXPECT_LT(status_of_this("RssAnon"), own_before + kSize / 4);
  }

  // bytes and their table, and nothing more with any round
  EXPECT_LE(before, kSize + 2 * MemoryPool::kExtentBytes);
  EXPECT_LE(peers().memory()->high_water(), before + 2 * (kSize + 2 * MemoryPool::kExtentBytes))
      << "a process may still read when the next run begins, so two may be held";
}

TEST_F(KeptOnHosts, IsReadOnlyForAll) {
  const auto kept = kept_of([] { return filled(kMiB, 7); });
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    *const_cast<volatile std::byte*>(kept->data()) = std::byte{1};
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);

  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

// Over the border of two pieces, and with other sizes as well.
TEST_F(KeptOnHosts, WhereHostsDifferAllHaveThatOfTheFirst) {
  constexpr std::size_t kSize = 4 * kMiB + 100;
  for (const std::size_t size_of_b : {kSize, kSize + 5, std::size_t{0}}) {
    const auto kept = kept_of([&] { return is_on_b() ? filled(size_of_b, 2) : filled(kSize, 1); });

    ASSERT_EQ(kept->size(), kSize);
    EXPECT_EQ(kept->data()[0], std::byte{1});
    EXPECT_EQ(kept->data()[kSize - 1], std::byte{1});
  }
}

TEST_F(KeptOnHosts, OfRanksOfAllHostsIsEverywhere) {
  constexpr std::size_t kSize = 4 * kMiB + 100;
  for (const int num_ranks : {kProcesses, 3}) {
    const auto store = make_trace_store(launcher(), num_ranks, 2 * kSize, Sharing::kOwn);
    const WorldReport report = run({.size = num_ranks, .name = "keep"}, [&](Rank& rank) {
      const auto size = kSize + static_cast<std::size_t>(rank.rank());
      (void)store->of_rank(rank.rank())->append(filled(size, rank.rank() + 65));
    });
    ASSERT_TRUE(report.ok()) << report.describe();

    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto kept = store->kept_by(rank);
      ASSERT_EQ(kept->size(), kSize + static_cast<std::size_t>(rank));
      EXPECT_EQ(kept->data()[0], std::byte(rank + 65));
      EXPECT_EQ(kept->data()[kept->size() - 1], std::byte(rank + 65));
    }
  }
}

// As emulations do, whose order of keeping depends on threads.
TEST_F(KeptOnHosts, OfOneProcessForAllRanksComesFromTheFirstHost) {
  const auto store = make_trace_store(launcher(), 3, kMiB, Sharing::kTogether);
  const WorldReport report = run({.size = 1, .name = "together"}, [&](Rank&) {
    (void)store->of_rank(2)->append(bytes_of(is_on_b() ? "planted" : "all three"));
  });
  ASSERT_TRUE(report.ok()) << report.describe();

  for (int rank = 0; rank < 3; ++rank) {
    const auto kept = store->kept_by(rank);
    ASSERT_EQ(kept->size(), 9U);
    EXPECT_EQ(std::memcmp(kept->data(), "all three", 9), 0);
  }
}

// Nobody waits for anybody who still reads: what is held longer is not given to the next run.
TEST_F(KeptOnHosts, StaysWhileAnyProcessHoldsIt) {
  auto held = kept_of([] { return filled(6 * kMiB, 9); });
  if (job().rank() % 2 == 0) held = nullptr;
  for (int round = 0; round < 3; ++round) {
    const auto next = kept_of([&] { return filled(6 * kMiB, 100 + round); });
    EXPECT_EQ(next->data()[0], std::byte(100 + round));
  }

  if (held != nullptr) {
    const std::byte* const data = held->data();
    EXPECT_TRUE(
        std::all_of(data, data + held->size(), [](std::byte b) { return b == std::byte{9}; }));
  }
}

TEST_F(KeptOnHosts, MoreThanTheHostHasIsAnErrorThatNamesIt) {
  EXPECT_THAT(
      [] {
        Arena arena(peers().memory(), 100, "small");
        (void)arena.append(std::vector<std::byte>(200));
      },
      ThrowsMessage<InfrastructureError>(HasSubstr("trace memory small is full")));
}

// An extent of this process alone: any other may begin what another process of the host keeps.
TEST_F(KeptOnHosts, AnExtentThatBeginsNoTraceMemoryIsAnErrorThatNamesIt) {
  MemoryPool& pool = *peers().memory();
  const pid_t owner = pool.new_owner();
  const std::byte* const taken = pool.take(1, owner);
  ASSERT_NE(taken, nullptr);
  const std::uint32_t extent = pool.extent_of(taken);
  EXPECT_THAT([&] { const Arena arena(peers().memory(), ArenaHandle{extent}, "other"); },
              ThrowsMessage<InfrastructureError>(
                  HasSubstr(fmt::format("extent {} of the host's memory must begin", extent))));
  EXPECT_EQ(pool.owner_of(extent), owner);
  pool.reclaim(owner);
}

// containers_test.sh runs this with 16 MiB of /dev/shm for each two processes.
TEST_F(KeptOnHosts, WhatTheFolderOfSegmentsHasNoRoomForIsAnErrorThatNamesIt) {
  if (std::getenv("ISOSHARD_EXPECTED_HOSTS") == nullptr) return;
  AttachedLauncher one_name(job(), "same");
  const std::size_t most = 64 * kMiB;
  std::string words = "nothing was thrown";
  if (forks_ranks_here(one_name)) {
    try {
      Arena arena(one_name.peers()->memory(), most, "large");
      for (std::size_t done = 0; done < most; done += kMiB) (void)arena.append(filled(kMiB, 1));
    } catch (const InfrastructureError& error) {
      words = error.what();
    }
    EXPECT_THAT(words, testing::AllOf(HasSubstr("trace memory large"), HasSubstr("/dev/shm must")));
  }
}

}  // namespace
}  // namespace isoshard
