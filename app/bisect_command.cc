// SPDX-License-Identifier: Apache-2.0
// isoshard bisect: the first commit whose runs are wrong.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/program_options/value_semantic.hpp>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "app/commands.h"
#include "core/base/error.h"
#include "harness/cli/output.h"
#include "harness/cli/progress.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/interrupt.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;
namespace fs = std::filesystem;
using Words = std::vector<std::string>;

struct Ended {
  int code = 0;
  std::string output;  ///< both streams
};

/// Runs a program with its output in a file, and waits for it.
/// Errors   InfrastructureError if it cannot be started.
Ended run_in(const fs::path& folder, const Words& words, const fs::path& log) {
  const int out = ::open(log.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  if (out < 0) throw InfrastructureError("cannot write " + log.string());
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGPIPE, SIG_DFL);
    const int nothing = ::open("/dev/null", O_RDONLY);
    if (::chdir(folder.c_str()) != 0 || ::dup2(nothing, 0) < 0 || ::dup2(out, 1) < 0 ||
        ::dup2(out, 2) < 0)
      ::_exit(127);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  ::close(out);
  if (child < 0) throw InfrastructureError("cannot start " + words.front());
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  std::ifstream file(log);
  std::stringstream text;
  text << file.rdbuf();
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return {code, text.str()};
}

/// The last lines that say something.
std::string end_of(const std::string& output, std::size_t lines) {
  std::vector<std::string> kept;
  std::istringstream stream(output);
  for (std::string line; std::getline(stream, line);)
    if (!line.empty()) kept.push_back("  " + line);
  if (kept.size() > lines) kept.erase(kept.begin(), kept.end() - static_cast<long>(lines));
  return fmt::format("{}\n", fmt::join(kept, "\n"));
}

enum class Judged { kGood, kBad, kSkipped };

std::string_view name_of(Judged judged) {
  if (judged == Judged::kGood) return "good";
  return judged == Judged::kBad ? "bad" : "skip";
}

/// A checkout of its own, in which git bisects: the one at hand is left as it is.
class Bisection {
 public:
  Bisection(Words command, fs::path repository)
      : command_(std::move(command)), repository_(std::move(repository)) {
    std::string name = (fs::temp_directory_path() / "isoshard-bisect-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw InfrastructureError("cannot make " + name);
    folder_ = name;
  }
  Bisection(const Bisection&) = delete;
  Bisection& operator=(const Bisection&) = delete;
  ~Bisection() {
    try {
      (void)run_in(repository_, {"git", "worktree", "remove", "--force", tree()}, log());
    } catch (const std::exception&) {  // nothing more can be done
    }
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  void begin(const std::string& commit) {
    (void)git(repository_, {"worktree", "add", "--detach", tree(), commit});
  }
  [[nodiscard]] std::string commit_of(const std::string& name) {
    const std::string commit = git(repository_, {"rev-parse", "--verify", name + "^{commit}"});
    return commit.substr(0, commit.find('\n'));
  }
  [[nodiscard]] std::string title_of(const std::string& commit) {
    const std::string title =
        git(repository_, {"show", "-s", "--format=%h %ad %s", "--date=short", commit});
    return title.substr(0, title.find('\n'));
  }
  std::string git(const fs::path& where, Words words) {
    words.insert(words.begin(), "git");
    const Ended ended = run_in(where, words, log());
    if (ended.code != 0)
      throw UsageError(fmt::format("{} failed: {}", fmt::join(words, " "), ended.output));
    return ended.output;
  }

  /// Exit code 0 means good, 1 and 5 (goldens) mean bad, and any other code leaves the commit
  /// undecided.
  Judged judge() {
    const Ended ended = run_in(tree(), command_, log());
    last_output_ = ended.output;
    last_code_ = ended.code;
    if (ended.code == kExitConforms) return Judged::kGood;
    return ended.code == kExitDiverges || ended.code == kExitGolden ? Judged::kBad
                                                                    : Judged::kSkipped;
  }
  [[nodiscard]] const std::string& last_output() const noexcept { return last_output_; }
  [[nodiscard]] int last_code() const noexcept { return last_code_; }
  [[nodiscard]] std::string tree() const { return (folder_ / "tree").string(); }

 private:
  [[nodiscard]] fs::path log() const { return folder_ / "log"; }

  Words command_;
  fs::path repository_, folder_;
  std::string last_output_;
  int last_code_ = 0;
};

void declare_bisect(OptionTable& table) {
  auto add = table.group("bisect");
  add("good", po::value<std::string>(), "a commit whose runs are right (first argument)");
  add("bad", po::value<std::string>(), "a later one whose runs are wrong (second argument)");
  add("command", po::value<Words>()->multitoken(),
      "what is run in a checkout of each commit, behind --: verify, golden or compare with their "
      "options, by ./isoshard of that checkout, which builds it; or any other program. Exit code 0 "
      "is right, 1 and 5 are wrong, any other says nothing of a commit");
  table.positional.add("good", 1).add("bad", 1).add("command", -1);
}

Words command_of(const ParsedOptions& options, const fs::path& build) {
  for (const char* name : {"good", "bad", "command"})
    if (!options.given(name))
      throw UsageError("nothing selected: bisect GOOD BAD -- COMMAND..., such as verify");
  Words words = options.get<Words>("command");
  static const std::set<std::string> kOwn = {"verify",   "golden", "compare",   "train",
                                             "converge", "oracle", "experiment"};
  if (kOwn.contains(words.front())) {
    words.insert(words.begin(), "./isoshard");
    ::setenv("ISOSHARD_BUILD_DIR", build.c_str(), 0);  // one for all commits
  }
  return words;
}

void require_end(Bisection& bisection, const std::string& commit, Judged wanted) {
  (void)bisection.git(bisection.tree(), {"checkout", "--quiet", "--detach", commit});
  const Judged judged = bisection.judge();
  print("{}  {}\n", name_of(judged), bisection.title_of(commit));
  if (judged == wanted || interrupt_signal() != 0) return;
  throw UsageError(fmt::format("{} must be {}, got exit code {}:\n{}", bisection.title_of(commit),
                               name_of(wanted), bisection.last_code(),
                               end_of(bisection.last_output(), 5)));
}

int run_bisect(const ParsedOptions& options) {
  const fs::path build =
      fs::temp_directory_path() / fmt::format("isoshard-bisect-build-{}", ::getuid());
  Bisection bisection(command_of(options, build), fs::current_path());
  const std::string good = bisection.commit_of(options.get<std::string>("good")),
                    bad = bisection.commit_of(options.get<std::string>("bad"));
  bisection.begin(bad);
  require_end(bisection, good, Judged::kGood);
  require_end(bisection, bad, Judged::kBad);
  std::string wrong = bisection.last_output();
  std::string said = bisection.git(bisection.tree(), {"bisect", "start", bad, good});
  while (interrupt_signal() == 0 && said.find("is the first bad commit") == said.npos) {
    const std::string commit = bisection.git(bisection.tree(), {"rev-parse", "HEAD"});
    const Judged judged = bisection.judge();
    if (interrupt_signal() != 0) break;
    print("{}  {}\n", name_of(judged), bisection.title_of(commit.substr(0, commit.find('\n'))));
    if (judged == Judged::kBad) wrong = bisection.last_output();
    try {
      said = bisection.git(bisection.tree(), {"bisect", std::string(name_of(judged))});
    } catch (const UsageError& error) {  // only commits are left that say nothing
      throw InfrastructureError(error.what());
    }
  }
  if (interrupt_signal() != 0) return 128 + interrupt_signal();
  const std::string first = said.substr(0, said.find(' '));
  print("\nThe first commit that is wrong:\n  {}\nIts run ended with\n{}",
        bisection.title_of(first), end_of(wrong, 6));
  return kExitConforms;
}

}  // namespace

Command bisect_command() {
  return {"bisect",
          "find the first commit whose runs are wrong",
          "bisect GOOD BAD -- COMMAND...",
          "  isoshard bisect v0.1 HEAD -- verify --preset small\n"
          "  isoshard bisect HEAD~20 HEAD -- golden verify\n"
          "  isoshard bisect good bad -- ./judge_my_training.sh         of any project in git",
          declare_bisect,
          run_bisect};
}

}  // namespace isoshard
