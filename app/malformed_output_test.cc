// SPDX-License-Identifier: Apache-2.0
/// Output folders that cannot be used or fill up: refused before a rank starts, or exit 4 with file
/// and bytes and the old file intact.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <csignal>

#include "app/testing/exit_codes.h"
#include "app/testing/malformed_rows.h"
#include "core/base/error.h"
#include "harness/cli/output_folder.h"
#include "harness/report/formats/report_formats.h"

namespace isoshard::malformed {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using namespace codes;

/// Writes a report.
const Arguments kQuickReport = {"experiment", "init", "--output-dir", "out"};

class MalformedOutput : public testing::TestWithParam<const char*> {
 protected:
  // also for a child that gave up root
  MalformedOutput() { fs::permissions(folder_.path(), fs::perms::all); }
  ~MalformedOutput() override {
    std::error_code ignored;
    fs::permissions(folder_ / "out", fs::perms::all, ignored);
  }

  /// A refusal that names option, folder and reason, and leaves everything as it was.
  void expect_refused(const Arguments& arguments, const std::string& reason,
                      const std::function<void()>& prepare = nullptr) {
    const auto before = tree_of(folder_.path());
    const ChildResult result = run_isoshard(folder_.path(), arguments, [&] {
      refuse_new_processes();
      if (prepare) prepare();
    });
    EXPECT_EQ(result.exit_code, kUsage) << result.error;
    EXPECT_THAT(result.error,
                AllOf(StartsWith("isoshard: --"), HasSubstr(" out: "), HasSubstr(reason)));
    EXPECT_EQ(result.output, "");
    EXPECT_EQ(tree_of(folder_.path()), before);
  }

  TestFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Option, MalformedOutput, testing::Values("--output-dir", "--dump"),
                         [](const auto& option) {
                           return std::string(option.param) == "--dump" ? "Dump" : "Reports";
                         });

TEST_P(MalformedOutput, ThatIsAFileIsRefused) {
  std::ofstream(folder_ / "out") << "mine";

  expect_refused(one_case({GetParam(), "out"}), "exists and is not a folder");
}

TEST_P(MalformedOutput, ThatIsALinkIsRefused) {
  fs::create_directory(folder_ / "elsewhere");
  fs::create_directory_symlink(folder_ / "elsewhere", folder_ / "out");

  expect_refused(one_case({GetParam(), "out"}), "is a symbolic link");
}

TEST_P(MalformedOutput, ThatIsReadOnlyIsRefused) {
  fs::create_directory(folder_ / "out");
  fs::permissions(folder_ / "out", fs::perms(0555));

  expect_refused(one_case({GetParam(), "out"}), "not writable: Permission denied", give_up_root);
}

TEST_P(MalformedOutput, ThatCannotBeMadeIsRefused) {
  std::ofstream(folder_ / "file") << "mine";

  const ChildResult result =
      run_isoshard(folder_.path(), one_case({GetParam(), "file/out"}), refuse_new_processes);

  EXPECT_EQ(result.exit_code, kUsage);
  EXPECT_THAT(result.error, AllOf(HasSubstr("file/out: "), HasSubstr("Not a directory")));
}

TEST_P(MalformedOutput, ThatAnotherRunUsesIsRefusedWithItsProcessNumber) {
  const OutputFolder other_run(folder_ / "out", "--output-dir");

  expect_refused(one_case({GetParam(), "out"}),
                 fmt::format("is in use by another run, process {}", ::getpid()));
}

TEST_F(MalformedOutput, OfOneRunMayBeTheSameFolderTwice) {
  const ChildResult result =
      run_isoshard(folder_.path(), one_case({"--output-dir", "out", "--dump", "out"}));

  EXPECT_EQ(result.exit_code, kConforms) << result.error;
  EXPECT_TRUE(fs::exists(folder_ / "out/report.json"));
  EXPECT_FALSE(fs::exists(folder_ / "out/.isoshard.lock"));
}

TEST_F(MalformedOutput, OfARunThatWasKilledIsFreeAgain) {
  const ChildResult killed = run_in_child([&] {
    const OutputFolder folder(folder_ / "out", "--output-dir");
    ::raise(SIGKILL);
    return 0;
  });
  ASSERT_EQ(killed.signal, SIGKILL);
  ASSERT_TRUE(fs::exists(folder_ / "out/.isoshard.lock"));

  const ChildResult result = run_isoshard(folder_.path(), kQuickReport);

  EXPECT_EQ(result.exit_code, kConforms) << result.error;
  EXPECT_EQ(tree_of(folder_ / "out").size(), 3U);  // the reports, no lock
}

/// `train` with a checkpoint to out/ddp.
Arguments saved_run(Arguments more = {}) {
  Arguments arguments = {"train", "--model", "tiny", "--subjects",  "ddp",  "--dp",
                         "2",     "--steps", "2",    "--reference", "none", "--save-checkpoint",
                         "out"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST_F(MalformedOutput, ForCheckpointsIsRefusedBeforeTheFirstStep) {
  const auto expect_told = [&](const std::string& reason, bool gives_up_root = false) {
    const ChildResult result = run_isoshard(folder_.path(), saved_run(), [&] {
      refuse_new_processes();
      if (gives_up_root) give_up_root();
    });
    EXPECT_EQ(result.exit_code, kUsage) << result.output << result.error;
    EXPECT_THAT(result.error,
                AllOf(StartsWith("isoshard: --save-checkpoint out/ddp: "), HasSubstr(reason)));
    EXPECT_EQ(result.output, "");
  };
  std::ofstream(folder_ / "out") << "mine";
  expect_told("cannot be made: Not a directory");
  fs::remove(folder_ / "out");
  fs::create_directories(folder_ / "out/ddp");
  fs::permissions(folder_ / "out/ddp", fs::perms(0555));
  expect_told("not writable: Permission denied", true);
  fs::permissions(folder_ / "out/ddp", fs::perms::all);
  const OutputFolder other_run(folder_ / "out/ddp", "--save-checkpoint");
  expect_told(fmt::format("is in use by another run, process {}", ::getpid()));
}

TEST_F(MalformedOutput, IsNotLeftBehindEmptyByARunThatWasRefused) {
  const ChildResult result =
      run_isoshard(folder_.path(), {"compare", "nothing", "here", "--output-dir", "out"});

  EXPECT_EQ(result.exit_code, kBadInput);
  EXPECT_TRUE(folder_.empty());
}

// ---- full disks (row 35 of docs/internals/failures.md)
// --------------------------------------------------------------------------------

class FullDisk : public MalformedOutput {
 protected:
  /// The error names the file and how much of it was written; whatever was there before is as it
  /// was.
  void expect_told(const ChildResult& result, const std::string& file,
                   const std::map<std::string, std::string>& before) {
    const std::string text = result.error + result.output;
    EXPECT_EQ(result.exit_code, kInfrastructure) << text << "signal " << result.signal;
    EXPECT_THAT(text,
                AllOf(HasSubstr(file + ": "), HasSubstr("failed after "), HasSubstr(" bytes: ")));
    for (const auto& [path, content] : before)
      EXPECT_EQ(tree_of(folder_.path()).at(path), content) << path;
    for (const auto& [path, content] : tree_of(folder_.path()))
      EXPECT_THAT(path, ::testing::Not(HasSubstr(".tmp."))) << content.size();
  }
};

// Only the writing itself: a limit on file sizes counts for the shared memory of traces, too.
TEST_F(FullDisk, LeavesTheOldReportAndNamesTheNewOne) {
  Report large;
  large.add(ReportCase{.name = "large", .failure = std::string(2000, 'x')});
  fs::create_directory(folder_ / "out");
  write_report(folder_ / "out", Report());
  const auto before = tree_of(folder_.path());

  const ChildResult result = run_in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    set_limit(RLIMIT_FSIZE, 512);
    try {
      write_report(folder_ / "out", large);
    } catch (const InfrastructureError& error) {
      std::fputs(error.what(), stderr);
      return kInfrastructure;
    }
    return kConforms;
  });

  expect_told(result, "out/report.json", before);
  EXPECT_THAT(result.error, HasSubstr("failed after 512 bytes: File too large"));
  EXPECT_EQ(tree_of(folder_.path()), before);
}

TEST_F(FullDisk, LeavesTheOldWeights) {
  ::signal(SIGXFSZ, SIG_DFL);  // as a shell leaves it: the program must not be killed
  std::ofstream(folder_ / "w.safetensors") << "old";
  const auto before = tree_of(folder_.path());

  const ChildResult result =
      run_isoshard(folder_.path(), one_case({"--save-init-weights", "w.safetensors"}), [] {
        refuse_new_processes();
        set_limit(RLIMIT_FSIZE, 100'000);
      });

  expect_told(result, "w.safetensors", before);
  EXPECT_THAT(result.error, HasSubstr("failed after 100000 bytes"));
}

// A disk of 256 KiB; where mounting is not allowed, a kernel that says so of every flush.
void fill_disk_at(const fs::path& folder) {
  if (::unshare(CLONE_NEWNS) == 0 &&
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
      ::mount("small", folder.c_str(), "tmpfs", 0, "size=256k") == 0) {
    return;
  }
  refuse_system_call(SYS_fsync, ENOSPC);
}

TEST_F(FullDisk, MakesADumpIncompleteAndNamesTheFile) {
  fs::create_directory(folder_ / "out");

  const ChildResult result =
      run_isoshard(folder_.path(), one_case({"--dump", "out", "--output-dir", "reports"}),
                   [] { fill_disk_at("out"); });

  const std::string text = result.error + result.output;
  EXPECT_EQ(result.exit_code, kInfrastructure) << text;
  // the first file that does not fit, or where no flush works the first of the bundle
  EXPECT_THAT(text,
              AllOf(HasSubstr("INCOMPLETE"),
                    AnyOf(HasSubstr("rank00000.safetensors: "), HasSubstr("/.isoshard-bundle: ")),
                    HasSubstr("No space left on device")));
  EXPECT_FALSE(result.left_processes);
}

TEST_F(FullDisk, OfStandardOutputIsAnError) {
  for (const Arguments& arguments : {Arguments{"list", "faults"}, Arguments{"verify", "--help"},
                                     Arguments{"verify", "--print-config"}}) {
    const ChildResult result = run_isoshard(
        folder_.path(), arguments, [] { ::dup2(::open("/dev/full", O_WRONLY), STDOUT_FILENO); });

    EXPECT_EQ(result.exit_code, kInfrastructure) << arguments[0];
    EXPECT_THAT(result.error, StartsWith("isoshard: cannot write")) << arguments[0];
  }
}

}  // namespace
}  // namespace isoshard::malformed
