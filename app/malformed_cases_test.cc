// SPDX-License-Identifier: Apache-2.0
/// Several cases of which one cannot be judged, and inputs that change: the others keep their
/// verdicts, and the exit code is the worst.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/stat.h>

#include <csignal>
#include <new>

#include "app/testing/malformed_rows.h"
#include "core/base/error.h"
#include "fixtures/cases/presets.h"
#include "harness/bundle/bundle_folder.h"
#include "harness/cli/output_folder.h"
#include "harness/report/formats/report_formats.h"
#include "suite/verify/verify.h"

namespace isoshard::malformed {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct Thrown {
  const char* name;
  void (*raise)();
  int exit_code;
};

const Thrown kThrown[] = {
    {"Usage", [] { throw UsageError("thrown"); }, 2},
    {"File", [] { throw FileError("thrown"); }, 3},
    {"Infrastructure", [] { throw InfrastructureError("thrown"); }, 4},
    {"NotBuilt", [] { throw NotBuiltError("thrown"); }, 4},
    {"Shape", [] { throw ShapeError("thrown"); }, 4},
    {"Memory", [] { throw std::bad_alloc(); }, 4},
};

void PrintTo(const Thrown& thrown, std::ostream* out) {
  *out << thrown.name;
}

/// Throws when the first case has run.
class ThrowInTheFirst : public VerifyObserver {
 public:
  explicit ThrowInTheFirst(void (*raise)()) : raise_(raise) {}
  void on_run(const Case& /*item*/, const Trace& /*trace*/) override {
    if (num_judged_ == 0) raise_();
  }
  void on_judged(const ReportCase& /*item*/) override { ++num_judged_; }

 private:
  void (*raise_)();
  int num_judged_ = 0;
};

class FailingCase : public testing::TestWithParam<Thrown> {};

INSTANTIATE_TEST_SUITE_P(Thrown, FailingCase, testing::ValuesIn(kThrown),
                         [](const auto& thrown) { return std::string(thrown.param.name); });

TEST_P(FailingCase, LeavesTheOthersTheirVerdicts) {
  std::vector<Case> cases = preset_cases("small");
  ASSERT_GE(cases.size(), 2U);
  cases.resize(2);
  ThrowInTheFirst observer(GetParam().raise);

  const Report report = verify({.cases = cases}, observer);

  ASSERT_EQ(report.cases.size(), 2U);
  EXPECT_EQ(report.cases[0].status(), Status::kIncomplete);
  EXPECT_THAT(report.cases[0].failure, testing::AnyOf(HasSubstr("thrown"), HasSubstr("memory")));
  EXPECT_EQ(report.cases[1].status(), Status::kConforms);
  EXPECT_EQ(report.exit_code, GetParam().exit_code);
}

TEST(FailFast, EndsWithTheFirstCaseThatIsNotAsItShouldBe) {
  std::vector<Case> cases = preset_cases("small");
  ASSERT_GE(cases.size(), 3U);
  cases.resize(3);
  ThrowInTheFirst in_the_first([] { throw InfrastructureError("thrown"); });

  const Report report = verify({.cases = cases, .fail_fast = true}, in_the_first);

  ASSERT_EQ(report.cases.size(), 1U);
  EXPECT_EQ(report.cases[0].status(), Status::kIncomplete);
  EXPECT_EQ(report.exit_code, kExitInfrastructure);
  EXPECT_EQ(report.summary,
            "0 of 3 cases conform, 1 is incomplete (qwen2_dp2); 2 did not run (--fail-fast)");
}

TEST(FailFast, RunsAllCasesThatConform) {
  std::vector<Case> cases = preset_cases("small");
  cases.resize(2);
  VerifyObserver quiet;

  const Report report = verify({.cases = cases, .fail_fast = true}, quiet);

  EXPECT_EQ(report.summary, "2 of 2 cases conform (exact)");
}

// ---- inputs that change ----

const Arguments kSmall = {"verify", "--preset", "small",   "--subjects", "ddp",
                          "--dp",   "2",        "--dtype", "fp32"};

Arguments small(const Arguments& more) {
  Arguments arguments = kSmall;
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// Shortens the file as soon as a process has mapped it, while that process is stopped.
class ChangeWhenMapped {
 public:
  ChangeWhenMapped(const fs::path& file, std::uintmax_t new_size) : child_(::fork()) {
    if (child_ != 0) return;
    ::alarm(500);
    for (;;) {
      for (const auto& process : fs::directory_iterator("/proc")) {
        const std::string name = process.path().filename().string();
        if (name.find_first_not_of("0123456789") != std::string::npos) continue;
        const auto is_mapped = [&] {
          return content_of(process.path() / "maps").find(file.string()) != std::string::npos;
        };
        if (!is_mapped()) continue;
        const pid_t pid = std::stoi(name);
        ::kill(pid, SIGSTOP);
        const bool is_caught = is_mapped();  // and not at its end
        if (is_caught) fs::resize_file(file, new_size);
        ::kill(pid, SIGCONT);
        if (is_caught) ::_exit(0);
      }
    }
  }
  ~ChangeWhenMapped() {
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }
  ChangeWhenMapped(const ChangeWhenMapped&) = delete;
  ChangeWhenMapped& operator=(const ChangeWhenMapped&) = delete;

 private:
  pid_t child_;
};

// A busy machine may run the whole case before the other process looks. Such a try shows nothing.
TEST(ChangingInput, ThatShrinksWhileItIsReadIsABadInput) {
  constexpr int kTries = 20;
  const TestFolder folder;
  const fs::path ids = fs::canonical(folder.path()) / "ids.bin";
  ChildResult result;
  bool is_changed = false;
  for (int attempt = 0; attempt < kTries && !is_changed; ++attempt) {
    // 3 MiB of ids: mapped, and read step by step by ranks
    std::ofstream(ids, std::ios::binary) << std::string(std::size_t{3} << 20, '\0');
    const ChangeWhenMapped change(ids, 4096);
    result = run_isoshard(folder.path(),
                          small({"--data", "ids.bin", "--steps", "3", "--output-dir", "out"}));
    is_changed = fs::file_size(ids) == 4096;
  }

  ASSERT_TRUE(is_changed);
  EXPECT_EQ(result.exit_code, 3) << result.output << result.error << "signal " << result.signal;
  EXPECT_THAT(result.output + result.error, HasSubstr("ids.bin: changed while reading"));
}

// ---- what killed runs leave
// -------------------------------------------------------------------------------------------------

TEST(KilledRun, AHalfWrittenDumpIsReplaced) {
  const TestFolder folder;
  ASSERT_EQ(run_isoshard(folder.path(), small({"--dump", "out"})).exit_code, 0);
  const auto whole = tree_of(folder / "out");
  // as a run leaves it that was killed while it wrote
  for (const auto& entry : fs::directory_iterator(folder / "out")) {
    fs::remove(entry.path() / "manifest.json");
    std::ofstream(entry.path() / detail::kBundleMarker) << "half";
    std::ofstream(entry.path() / "step0000/rank00000.json.tmp.1.1.0") << "half";
    fs::create_directory(entry.path() / "step0009");
  }

  const ChildResult result = run_isoshard(folder.path(), small({"--dump", "out"}));

  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
  EXPECT_EQ(tree_of(folder / "out"), whole);
}

TEST(KilledRun, AFolderOfSomebodyElseIsNoHalfWrittenDump) {
  const TestFolder folder;
  fs::create_directories(folder / "out/step0000");

  EXPECT_THROW(detail::prepare_bundle_folder(folder / "out"), UsageError);

  EXPECT_TRUE(fs::exists(folder / "out/step0000"));
}

TEST(KilledRun, TemporaryReportsOfItAreSwept) {
  const TestFolder folder;
  fs::create_directory(folder / "out");
  std::ofstream(folder / "out/report.json.tmp.4194305.1.0") << "half";

  const ChildResult result = run_isoshard(folder.path(), small({"--output-dir", "out"}));

  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(tree_of(folder / "out").size(), 3U);
}

/// The child is killed where it would start its first rank.
void die_at_the_first_rank() {
  ::pthread_atfork([] { ::raise(SIGKILL); }, nullptr, nullptr);
}

// Whoever looks into the folder afterwards must not find the verdict of the run before.
TEST(KilledRun, LeavesNoReportOfTheRunBefore) {
  const TestFolder folder;
  const Arguments arguments = small({"--output-dir", "out", "--report", "out/page.html"});
  ASSERT_EQ(run_isoshard(folder.path(), arguments).exit_code, 0);
  const auto before = tree_of(folder / "out");
  ASSERT_EQ(before.size(), 4U);

  const ChildResult killed = run_isoshard(folder.path(), arguments, die_at_the_first_rank);

  ASSERT_EQ(killed.signal, SIGKILL) << killed.output << killed.error;
  auto after = tree_of(folder / "out");
  for (const auto& [name, content] : before) {
    EXPECT_FALSE(after.contains(name)) << name;
    EXPECT_EQ(after[name + ".old"], content) << name;
  }
  for (const Arguments& reader : {Arguments{"report", "out"}, small({"--failed-from", "out"})}) {
    const ChildResult read = run_isoshard(folder.path(), reader, refuse_new_processes);
    EXPECT_EQ(read.exit_code, 3) << read.error;
    EXPECT_THAT(read.error, AllOf(HasSubstr("ended without a report"), HasSubstr("json.old")));
  }

  ASSERT_EQ(run_isoshard(folder.path(), arguments).exit_code, 0);

  EXPECT_EQ(tree_of(folder / "out").size(), 4U) << "the old ones go when the new ones are there";
}

TEST(OutputPlaces, ThatAreNoRegularFilesAreRefusedBeforeARankStarts) {
  for (const char* name : {"report.json", "report.txt"}) {
    const TestFolder folder;
    fs::create_directory(folder / "out");
    ASSERT_EQ(::mkfifo((folder / "out" / name).c_str(), 0600), 0);

    const ChildResult result =
        run_isoshard(folder.path(), small({"--output-dir", "out"}), refuse_new_processes);

    EXPECT_EQ(result.exit_code, 2) << result.error;
    EXPECT_THAT(result.error, AllOf(HasSubstr(name), HasSubstr("is a FIFO")));
  }
  const TestFolder folder;
  const ChildResult result = run_isoshard(
      folder.path(), small({"--save-init-weights", "/dev/full"}), refuse_new_processes);

  EXPECT_EQ(result.exit_code, 2) << result.error;
  EXPECT_THAT(result.error, HasSubstr("/dev/full: is a device"));
}

TEST(OutputPlaces, ThatAreSwappedForALinkAreNotFollowed) {
  const TestFolder folder;
  fs::create_directories(folder / "above/out");
  fs::create_directories(folder / "victim/out");

  const ChildResult result = run_in_child([&] {
    fs::current_path(folder.path());
    const OutputFolder reports("above/out", "--output-dir");
    fs::rename("above", "moved");
    fs::create_directory_symlink("victim", "above");
    write_report("above/out", Report());
    return 0;
  });

  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_TRUE(fs::is_empty(folder / "victim/out"));
  EXPECT_TRUE(fs::exists(folder / "moved/out/report.json"));
  EXPECT_FALSE(fs::exists(folder / "moved/out/.isoshard.lock"));
}

// ---- deadlines
// -------------------------------------------------------------------------------------------------

TEST(DeadlineOption, MustBeATime) {
  const TestFolder folder;
  for (const char* value : {"0", "-1", "nan", "1e9", "soon"}) {
    const ChildResult result =
        run_isoshard(folder.path(), small({"--deadline", value}), refuse_new_processes);

    EXPECT_EQ(result.exit_code, 2) << value;
    EXPECT_THAT(result.error, HasSubstr("deadline")) << value;
  }
}

TEST(DeadlineOption, IsThatOfTheCase) {
  const TestFolder folder;

  const ChildResult result = run_isoshard(folder.path(), small({"--deadline", "30"}));

  EXPECT_EQ(result.exit_code, 0) << result.error;
}

}  // namespace
}  // namespace isoshard::malformed
