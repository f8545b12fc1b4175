// SPDX-License-Identifier: Apache-2.0
/// Machines that lack what most have: a run needs none of it, and says nothing false about it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>

#include <filesystem>

#include "app/testing/malformed_rows.h"

namespace isoshard::malformed {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kRefused = 77;

// An empty folder in place of each, for this process and those that it starts.
bool hide(std::initializer_list<const char*> folders) {
  if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
  for (const char* folder : folders) {
    if (::mount("none", folder, "tmpfs", 0, nullptr) != 0) return false;
  }
  return true;
}

ChildResult run_without_proc_and_dev(const Arguments& arguments) {
  const TestFolder folder;
  return run_isoshard(folder.path(), arguments, [] {
    if (!hide({"/proc", "/dev"})) ::_exit(kRefused);
    ASSERT_FALSE(std::filesystem::exists("/dev/null"));
    ASSERT_FALSE(std::filesystem::exists("/proc/self"));
  });
}

TEST(MalformedMachine, WithoutProcAndDevNullRunsAllTheSame) {
  const ChildResult result = run_without_proc_and_dev(
      {"verify", "--preset", "small", "--subjects", "autotp", "--tp", "2", "--dtype", "fp32"});
  if (result.exit_code == kRefused) GTEST_SKIP() << "needs the right to mount in a namespace";

  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
  EXPECT_THAT(result.output, HasSubstr("conform"));
  EXPECT_FALSE(result.left_processes);
}

TEST(MalformedMachine, WithoutProcIsStillRefusedWhatDoesNotFitInItsMemory) {
  const ChildResult result =
      run_without_proc_and_dev({"verify", "--preset", "small", "--subjects", "ddp", "--dp", "2",
                                "--batch-size", "10000000"});
  if (result.exit_code == kRefused) GTEST_SKIP() << "needs the right to mount in a namespace";

  EXPECT_EQ(result.exit_code, 2) << result.error;
  EXPECT_THAT(result.error, HasSubstr("GiB of memory, the machine has "));
  EXPECT_THAT(result.error, Not(HasSubstr("the machine has 0 GiB")));
}

}  // namespace
}  // namespace isoshard::malformed
