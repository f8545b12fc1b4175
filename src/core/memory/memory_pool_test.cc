// SPDX-License-Identifier: Apache-2.0
/// Claims about memory that worlds take over from each other: nobody shares it and nothing is lost.
#include "core/memory/memory_pool.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

constexpr std::size_t kExtent = MemoryPool::kExtentBytes;

TEST(MemoryPool, GivesTheLowestFreePieceToOneOwner) {
  MemoryPool pool(8 * kExtent);
  std::byte* const a = pool.take(kExtent + 1, 1);
  std::byte* const b = pool.take(kExtent, 2);
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(b, a + 2 * kExtent);
  EXPECT_EQ(pool.take(6 * kExtent, 1), nullptr) << "5 are left";

  pool.give_back(a);
  EXPECT_EQ(pool.take(3 * kExtent, 1), a + 3 * kExtent) << "before b there are two";
  EXPECT_EQ(pool.take(2 * kExtent, 1), a);
  EXPECT_TRUE(pool.holds(a) && !pool.holds(a + 8 * kExtent));
  EXPECT_EQ(pool.high_water(), 6 * kExtent);
}

TEST(MemoryPool, TakesTheLowestExtentsWhereTheyNeedNotLieTogether) {
  MemoryPool pool(8 * kExtent);
  std::byte* const a = pool.take(kExtent, 1);
  std::byte* const b = pool.take(kExtent, 1);
  std::byte* const c = pool.take(2 * kExtent, 1);
  ASSERT_NE(c, nullptr);
  EXPECT_EQ(pool.high_water(), 4 * kExtent);
  pool.give_back(a);
  pool.give_back(c);
  const pid_t owner = pool.new_owner(), other = pool.new_owner();
  EXPECT_NE(owner, other);

  EXPECT_EQ(pool.take_scattered(2, owner), (std::vector<std::uint32_t>{0, 2}));
  EXPECT_EQ(pool.high_water(), 4 * kExtent);
  EXPECT_EQ(pool.take_scattered(2, other), (std::vector<std::uint32_t>{3, 4}));
  EXPECT_EQ(pool.high_water(), 5 * kExtent);
  EXPECT_EQ(pool.take_scattered(4, other).size(), 3U) << "there are no more";
  EXPECT_EQ(pool.owner_of(b), 1);

  pool.reclaim(owner);
  EXPECT_EQ(pool.take_scattered(9, other), (std::vector<std::uint32_t>{0, 2}));
}

TEST(MemoryPool, ShowsAnExtentAtASecondAddress) {
  MemoryPool pool(8 * kExtent);
  std::byte* const piece = pool.take(3 * kExtent, 1);
  std::memset(piece, 7, 3 * kExtent);
  void* const place = ::mmap(nullptr, 2 * kExtent, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(place, MAP_FAILED);
  auto* const second = static_cast<std::byte*>(place);

  ASSERT_TRUE(pool.map_at(second, 1, 2, PROT_READ | PROT_WRITE));

  EXPECT_EQ(second[0], std::byte{7});
  second[kExtent] = std::byte{9};
  EXPECT_EQ(piece[2 * kExtent], std::byte{9});
  EXPECT_EQ(piece[kExtent], std::byte{7});
  ::munmap(place, 2 * kExtent);
}

// Whether a forked process can write there.
bool can_write(std::byte* data) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    *const_cast<volatile std::byte*>(data) = std::byte{1};
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status == 0;
}

TEST(MemoryPool, WhatIsProtectedCanBeWrittenAgainByWhoTakesIt) {
  MemoryPool pool(8 * kExtent);
  const pid_t owner = pool.new_owner();
  std::byte* const a = pool.take(kExtent, owner);
  std::byte* const b = pool.take(2 * kExtent, 1);
  EXPECT_TRUE(can_write(a));

  pool.protect(owner);
  EXPECT_FALSE(can_write(a));
  EXPECT_TRUE(can_write(b));

  // In a process that has it protected and learns only from the table that it is free.
  const pid_t child = ::fork();
  if (child == 0) {
    pool.give_back(a);
    std::byte* const again = pool.take(kExtent, ::getpid());
    if (again != a) ::_exit(1);
    *again = std::byte{1};
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);

  pool.reclaim(child);
  pool.protect(1);
  pool.reclaim(1);
  EXPECT_TRUE(can_write(b));
}

TEST(MemoryPool, NamesTheLimitOnFilesThatItWouldExceed) {
  const pid_t child = ::fork();
  if (child == 0) {
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = 4 * kExtent;
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      const MemoryPool pool(8 * kExtent);
    } catch (const InfrastructureError& error) {
      ::_exit(std::string_view(error.what()).find("got 8388608") != std::string_view::npos ? 0 : 2);
    }
    ::_exit(1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(MemoryPool, ReclaimsWhatAProcessOwnedThatIsGone) {
  MemoryPool pool(8 * kExtent);
  std::byte* const a = pool.take(kExtent, 1);
  std::byte* const b = pool.take(kExtent, 2);
  ASSERT_NE(pool.take(2 * kExtent, 1), nullptr);
  pool.reclaim(1);

  EXPECT_EQ(pool.take(kExtent, 3), a);
  EXPECT_EQ(pool.take(2 * kExtent, 3), b + kExtent) << "b is still owned";
}

TEST(MemoryPool, TrimmingFreesMemoryAndLeavesWhatIsOwned) {
  MemoryPool pool(8 * kExtent);
  std::byte* const owned = pool.take(kExtent, ::getpid());
  std::byte* const free = pool.take(kExtent, ::getpid());
  std::memset(owned, 1, kExtent);
  std::memset(free, 1, kExtent);
  pool.give_back(free);
  pool.trim();

  EXPECT_EQ(pool.take(kExtent, ::getpid()), free);
  EXPECT_EQ(std::count(free, free + kExtent, std::byte{0}), static_cast<std::ptrdiff_t>(kExtent));
  EXPECT_EQ(std::count(owned, owned + kExtent, std::byte{1}), static_cast<std::ptrdiff_t>(kExtent));
}

// Each process marks what it holds and looks whether the marks stay.
TEST(MemoryPool, ProcessesThatTakeAtOnceNeverShare) {
  MemoryPool pool(24 * kExtent);
  constexpr int kProcesses = 4, kRounds = 3000;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = ::fork();
    if (child == 0) {
      const pid_t self = ::getpid();
      bool right = true;
      for (int round = 0; right && round < kRounds; ++round) {
        const std::size_t bytes = kExtent * static_cast<std::size_t>(1 + (round + p) % 3);
        std::byte* const data = pool.take(bytes, self);
        if (data == nullptr) continue;
        for (std::size_t at = 0; at < bytes; at += kExtent)
          std::memcpy(data + at, &self, sizeof self);
        for (std::size_t at = 0; at < bytes; at += kExtent)
          right = right && std::memcmp(data + at, &self, sizeof self) == 0;
        pool.give_back(data);
      }
      ::_exit(right ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "a process found another one's mark in its memory, or crashed";
  }
}

/// Runs `act` in a process that sees a tmpfs of two pages at /tmp, of which `free` are free.
/// Returns how it ended; nothing where none may be mounted.
std::optional<int> in_a_full_folder(std::size_t free, const std::function<bool(int fd)>& act) {
  constexpr int kRefused = 77;
  const pid_t child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", "/tmp", "tmpfs", 0, "size=8k") != 0)
      ::_exit(kRefused);
    const std::vector<char> filling((2 - free) * 4096, 'x');
    const int filled = ::open("/tmp/filling", O_WRONLY | O_CREAT, 0600);
    if (::write(filled, filling.data(), filling.size()) != static_cast<ssize_t>(filling.size()))
      ::_exit(2);
    ::_exit(act(::open("/tmp/pool", O_RDWR | O_CREAT, 0600)) ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kRefused) return std::nullopt;
  return status;
}

// What a process writes to without asking must have its memory before.
TEST(MemoryPool, InAFullFolderIsAnErrorAndNoSignal) {
  const std::optional<int> without_table = in_a_full_folder(0, [](int fd) {
    try {
      MemoryPool pool(fd, 8 * kExtent);
      (void)pool.new_owner();
    } catch (const InfrastructureError& error) {
      return std::string_view(error.what()).find("No space left") != std::string_view::npos;
    }
    return false;
  });
  if (!without_table.has_value()) GTEST_SKIP() << "needs the right to mount in a namespace";
  EXPECT_EQ(*without_table, 0);

  EXPECT_EQ(in_a_full_folder(1,
                             [](int fd) {
                               MemoryPool pool(fd, 8 * kExtent);
                               const bool has_none =
                                   pool.take(kExtent, pool.new_owner()) == nullptr;
                               return has_none && errno == ENOSPC;
                             }),
            0);
}

}  // namespace
}  // namespace isoshard
