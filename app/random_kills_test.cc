// SPDX-License-Identifier: Apache-2.0
// Any process of a run may be killed at any time: nothing of it is left, and nothing passes that
// was not judged.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "harness/testing/test_child.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// How much CPU time the processes of a run may use before it ends, and for how long they may use
/// none. On an idle machine a run, and what is left of a killed one, end within seconds.
constexpr milliseconds kMostUsed{60'000}, kMostIdle{60'000};
constexpr unsigned kSeed = 20;

/// A run of the program under another name of a folder, by which its processes are found.
class Run {
 public:
  Run(std::vector<std::string> command, const fs::path& folder) : folder_(folder) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    pid_ = ::fork();
    if (pid_ < 0) throw std::runtime_error("no child");
    if (pid_ == 0) {
      ::prctl(PR_SET_CHILD_SUBREAPER, 0);
      ::setenv("TMPDIR", folder_.c_str(), 1);
      ::dup2(ends[1], STDOUT_FILENO);
      ::dup2(ends[1], STDERR_FILENO);
      std::vector<char*> arguments;
      for (std::string& argument : command) arguments.push_back(argument.data());
      arguments.push_back(nullptr);
      ::execvp(arguments[0], arguments.data());
      ::_exit(127);
    }
    ::close(ends[1]);
    output_fd_ = ends[0];
    pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  }
  ~Run() {
    ::close(output_fd_);
    ::close(pidfd_);
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// Reads what is printed until the run has ended or takes too long. Whether it has ended.
  bool read_to_end() {
    Patience patience(*this);
    while (!read_until(steady_clock::now() + milliseconds(100))) {
      if (patience.is_over()) return false;
    }
    return true;
  }

  /// Whether a run takes too long, however busy the machine is with others.
  class Patience {
   public:
    explicit Patience(const Run& run) : run_(run), at_begin_(run.cpu_time()) {}
    bool is_over() {
      const milliseconds used = run_.cpu_time();
      const auto now = steady_clock::now();
      if (used != std::exchange(used_, used)) changed_ = now;
      return used - at_begin_ > kMostUsed || now - changed_ > kMostIdle;
    }

   private:
    const Run& run_;
    milliseconds at_begin_, used_{0};
    steady_clock::time_point changed_ = steady_clock::now();
  };

  /// Reads what is printed until the time is over or the run has ended. Whether it has ended.
  bool read_until(steady_clock::time_point end) {
    for (;;) {
      const auto left = std::chrono::duration_cast<milliseconds>(end - steady_clock::now());
      const int time = std::max(0, static_cast<int>(left.count()));
      std::array<pollfd, 2> waits{pollfd{pidfd_, POLLIN, 0}, pollfd{output_fd_, POLLIN, 0}};
      const int count = ::poll(waits.data(), is_closed_ ? 1 : 2, time);
      if (count <= 0) return false;
      if (!is_closed_ && waits[1].revents != 0) {
        take();
      } else if (waits[0].revents != 0) {
        return true;
      }
    }
  }

  /// Itself, and all that it has started.
  [[nodiscard]] std::vector<pid_t> processes() const {
    const std::string mark = "TMPDIR=" + folder_.string();
    std::vector<pid_t> found;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator("/proc", ignored)) {
      const std::string name = entry.path().filename().string();
      pid_t pid = 0;
      const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
      if (error != std::errc() || *end != '\0') continue;
      std::ifstream file(entry.path() / "environ", std::ios::binary);
      const std::string all{std::istreambuf_iterator<char>(file), {}};
      const std::size_t at = all.find(mark);
      if (at != all.npos && all[at + mark.size()] == '\0') found.push_back(pid);
    }
    return found;
  }

  /// CPU time of those that are there.
  [[nodiscard]] milliseconds cpu_time() const {
    long ticks = 0;
    for (const pid_t pid : processes()) {
      std::ifstream file(fs::path("/proc") / std::to_string(pid) / "stat");
      std::string line;
      std::getline(file, line);
      // after "PID (NAME)": eleven fields, then those of user and of system
      std::istringstream fields(line.substr(std::min(line.size(), line.rfind(')') + 1)));
      std::string skipped;
      for (int i = 0; i < 11; ++i) fields >> skipped;
      long user = 0, system = 0;
      if (fields >> user >> system) ticks += user + system;
    }
    return milliseconds(ticks * 1000 / ::sysconf(_SC_CLK_TCK));
  }

  /// The exit code, or -1 if it was killed; with what was printed until its end.
  int wait() {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    while (!is_closed_) {
      pollfd ready{output_fd_, POLLIN, 0};
      if (::poll(&ready, 1, 0) <= 0) break;
      take();
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] const std::string& output() const { return output_; }

 private:
  void take() {
    std::array<char, 4096> bytes{};
    const ssize_t count = ::read(output_fd_, bytes.data(), bytes.size());
    if (count <= 0) {
      is_closed_ = true;
    } else {
      output_.append(bytes.data(), static_cast<std::size_t>(count));
    }
  }

  fs::path folder_;
  pid_t pid_ = -1;
  int output_fd_ = -1, pidfd_ = -1;
  bool is_closed_ = false;
  std::string output_;
};

/// What each process is and waits for, as ps shows it.
std::string description_of(const std::vector<pid_t>& processes) {
  std::string text;
  for (const pid_t pid : processes) {
    const fs::path folder = fs::path("/proc") / std::to_string(pid);
    std::string state, waits_in;
    std::getline(std::ifstream(folder / "stat"), state);
    std::getline(std::ifstream(folder / "wchan"), waits_in);
    text += state.substr(0, 60) + " waits in " + waits_in + "\n";
  }
  return text;
}

/// The line of the verdict, which says how many tensors were compared.
std::string verdict_of(const std::string& output) {
  const std::size_t begin = output.find("CONFORMS");
  return begin == output.npos ? "" : output.substr(begin, output.find('\n', begin) - begin);
}

void expect_kills_leave_nothing(const std::vector<std::string>& command, int num_kills) {
  become_subreaper();
  const TestFolder folder;
  std::string verdict;
  auto length = milliseconds::max();
  // The shortest of three: the first one reads the program from the disk.
  for (int i = 0; i < 3; ++i) {
    const auto start = steady_clock::now();
    Run undisturbed(command, folder.path());
    ASSERT_TRUE(undisturbed.read_to_end());
    ASSERT_EQ(undisturbed.wait(), 0) << undisturbed.output();
    length =
        std::min(length, std::chrono::duration_cast<milliseconds>(steady_clock::now() - start));
    verdict = verdict_of(undisturbed.output());
    ASSERT_NE(verdict, "") << undisturbed.output();
  }

  std::mt19937 random(kSeed);
  int landed = 0;
  for (int i = 0; i < num_kills; ++i) {
    SCOPED_TRACE(testing::Message() << "kill " << i);
    Run run(command, folder.path());
    const auto after = milliseconds(random() % static_cast<unsigned>(length.count()));
    if (!run.read_until(steady_clock::now() + after)) {
      const std::vector<pid_t> all = run.processes();
      if (!all.empty() && ::kill(all[random() % all.size()], SIGKILL) == 0) ++landed;
    }
    const bool has_ended = run.read_to_end();
    EXPECT_TRUE(has_ended) << "it is still there: " << run.output() << '\n'
                           << description_of(run.processes());
    if (!has_ended) ::kill(run.pid(), SIGKILL);
    const int code = run.wait();

    // Whatever says that it passed has seen all that an undisturbed run sees.
    if (code == 0) {
      EXPECT_EQ(verdict_of(run.output()), verdict);
    }
    std::vector<pid_t> left = run.processes();
    Run::Patience patience(run);
    while (!left.empty() && !patience.is_over()) {
      while (::waitpid(-1, nullptr, WNOHANG) > 0) {
      }
      left = run.processes();
    }
    EXPECT_TRUE(left.empty()) << "left behind: " << description_of(left) << run.output();
    for (const pid_t pid : left) ::kill(pid, SIGKILL);
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(landed, num_kills / 2);

  // The next run sweeps what killed ones had no time to remove.
  Run last(command, folder.path());
  ASSERT_TRUE(last.read_to_end());
  EXPECT_EQ(last.wait(), 0) << last.output();
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    const std::string name = entry.path().filename().string();
    // The folder of a session of mpirun, which nobody removes if mpirun itself is killed.
    if (!name.starts_with("ompi.")) files.push_back(name);
  }
  // Those that share a host's memory; of other programs' processes, which are alive, not.
  for (const auto& entry : fs::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename().string();
    const std::size_t mark = name.rfind(".tmp.");
    if (!name.starts_with("isoshard-") || mark == std::string::npos) continue;
    const std::string pid = name.substr(mark + 5, name.find('.', mark + 5) - mark - 5);
    if (!fs::exists("/proc/" + pid)) files.push_back(name);
  }
  EXPECT_THAT(files, testing::IsEmpty());
}

std::vector<std::string> forked() {
  return {ISOSHARD_PROGRAM, "verify", "--preset", "small", "--subjects", "autotp",
          "--dtype",        "fp32",   "--tp",     "2",     "--dp",       "1"};
}

TEST(RandomKills, OfForkedRanksLeaveNothingAndPassNothing) {
  expect_kills_leave_nothing(forked(), 50);
}

TEST(RandomKillsWide, OfForkedRanksLeaveNothingAndPassNothing) {
  expect_kills_leave_nothing(forked(), 1000);
}

#ifdef ISOSHARD_MPIEXEC
std::vector<std::string> attached() {
  std::vector<std::string> command = {ISOSHARD_MPIEXEC,
                                      "--oversubscribe",
                                      "--bind-to",
                                      "none",
                                      "--mca",
                                      "mpi_yield_when_idle",
                                      "1",
                                      "-n",
                                      "2"};
  if (::getuid() == 0) command.insert(command.begin() + 1, "--allow-run-as-root");
  for (const std::string& argument : forked()) command.push_back(argument);
  command.emplace_back("--attach");
  return command;
}

TEST(RandomKillsOfMpi, LeaveNothingAndPassNothing) {
  expect_kills_leave_nothing(attached(), 8);
}

TEST(RandomKillsOfMpiWide, LeaveNothingAndPassNothing) {
  expect_kills_leave_nothing(attached(), 1000);
}
#endif

}  // namespace
}  // namespace isoshard
