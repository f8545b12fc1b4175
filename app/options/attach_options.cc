// SPDX-License-Identifier: Apache-2.0
/// One job a process, at most.
#include "app/options/attach_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/program_options/value_semantic.hpp>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#include "core/base/error.h"
#include "core/comm/attached_job.h"
#include "core/comm/backend.h"
#include "core/comm/nccl/nccl_world.h"
#include "fixtures/cases/world_size.h"
#include "harness/cli/output.h"
#include "harness/verdict/exit_code.h"
#include "harness/world/attached/attached_launcher.h"
#include "harness/world/attached/last_words.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/gpus.h"
#include "harness/world/persistent/persistent_ranks.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

constexpr std::string_view kAttach = "--attach", kPersistent = "--persistent-ranks";

struct Joined {
  std::unique_ptr<AttachedJob> job;
  std::unique_ptr<AttachedLauncher> launcher;
};

// Lives until the program ends: default_launcher() refers to it.
Joined& joined() {
  static Joined& instance = *new Joined;
  return instance;
}

// The mildest first, as combine_exit_codes orders them.
constexpr std::array kCodes = {kExitConforms, kExitGolden,     kExitDiverges,
                               kExitBadInput, kExitUsage,      kExitInfrastructure,
                               kExitHangup,   kExitTerminated, kExitInterrupted};

std::uint64_t severity(int code) {
  const auto found = std::ranges::find(kCodes, code);
  return static_cast<std::uint64_t>(
      (found == kCodes.end() ? std::ranges::find(kCodes, kExitInfrastructure) : found) -
      kCodes.begin());
}

void check_size(const ParsedOptions& options, int size) {
  if (!options.given("expect-world-size")) return;
  const int expected = options.get<int>("expect-world-size");
  if (expected == size) return;
  throw UsageError(
      fmt::format("the attached world must have {} ranks (--expect-world-size), got {}; start it "
                  "with mpirun -n {}",
                  expected, size, expected));
}

/// Of the program's own arguments: what follows "--" is another program's. Help and settings need
/// no ranks.
bool asks_for_ranks(const std::vector<std::string>& arguments, std::string_view option) {
  const auto end = std::ranges::find(arguments, "--");
  const auto has = [&](std::string_view name) {
    return std::find(arguments.begin(), end, name) != end;
  };
  return has(option) && !has("--help") && !has("-h") && !has("--print-config");
}

std::unique_ptr<AttachedJob> attach_job() {
  if (!why_nccl_is_not_built().empty()) return attach_mpi_job();
  (void)count_gpus();  // in a child, which this process can fork no longer once it has CUDA
  return attach_nccl_job();
}

/// Processes with other arguments would go other ways, and wait for each other until the deadline.
void require_equal_arguments(AttachedJob& job, const std::vector<std::string>& arguments) {
  const std::uint64_t own = std::hash<std::string>{}(fmt::format("{}", fmt::join(arguments, "\n")));
  const std::uint64_t most = job.largest(own), least = ~job.largest(~own);
  if (most == least) return;
  throw UsageError(
      fmt::format("all processes must have the same arguments, and rank {} of {} has: {}; give "
                  "mpirun one program",
                  job.rank(), job.size(), fmt::join(arguments, " ")));
}

/// A launcher that starts the processes of a job.
struct Starter {
  const char* name;
  const char* its_own;             ///< a variable that this launcher alone sets
  const char* size;                ///< the variable with the number of processes
  std::vector<std::string> words;  ///< a command line that ends before that number
};

/// Null without a launcher.
const Starter* starter_of_this_process() {
  // The innermost launcher counts: mpirun starts its own processes within a step of srun.
  static const std::vector<Starter> starters = {
      {"torchrun",
       "TORCHELASTIC_RUN_ID",
       "WORLD_SIZE",
       {"torchrun", "--no-python", "--nproc-per-node"}},
      {"mpirun or srun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", {"mpirun", "-n"}},
      {"mpirun or srun", "PMI_SIZE", "PMI_SIZE", {"mpirun", "-n"}},
      {"mpirun or srun", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS", {"srun", "-n"}}};
  for (const Starter& starter : starters)
    if (std::getenv(starter.size) != nullptr && std::getenv(starter.its_own) != nullptr)
      return &starter;
  return nullptr;
}

/// The words before this program in the command that repeats the job.
void note_launcher(int num_processes) {
  const Starter* const starter = starter_of_this_process();
  if (starter == nullptr) return;
  const std::string number = std::to_string(num_processes);
  // torchrun takes the number of one host
  const char* const on_this_host = std::getenv("LOCAL_WORLD_SIZE");
  if (starter->words.front() == "torchrun" && (on_this_host == nullptr || number != on_this_host))
    return;
  std::vector<std::string> words = starter->words;
  words.push_back(number);
  set_launcher_words(std::move(words));
}

}  // namespace

void refuse_more_than_fork(const Case& item, std::string_view way_out) {
  if (item.world_size() <= kMaxWorldSize) return;
  throw UsageError(fmt::format("{} needs {} ranks; forked ranks are from 1 to {}{}",
                               describe(item.degrees), item.world_size(), kMaxWorldSize, way_out));
}

void refuse_several_processes(std::string_view command) {
  const Starter* const starter = starter_of_this_process();
  if (starter == nullptr) return;
  const char* const size = std::getenv(starter->size);
  if (std::atoi(size) < 2) return;
  throw UsageError(fmt::format(
      "{} started {} processes ({}), each of which would run all ranks of its own; {}",
      starter->name, size, starter->size,
      command.empty() ? std::string("add --attach, or start one process")
                      : fmt::format("isoshard {} forks its ranks and has no --attach: start one "
                                    "process of it, without mpirun",
                                    command)));
}

void declare_attach_options(OptionTable& table) {
  auto add = table.group("ranks");
  add("attach", po::bool_switch(),
      "the ranks are the processes that mpirun, or srun with PMIx, has started; with NCCL also "
      "torchrun");
  add("persistent-ranks", po::value<int>(),
      "fork this many processes once; they are the ranks of all worlds of this run and communicate "
      "through NCCL");
  add("expect-world-size", po::value<int>(),
      "with --attach: the number of processes that the job must have");
}

std::optional<int> run_on_persistent_ranks(
    const std::vector<std::string>& arguments,
    const std::function<int(const std::vector<std::string>&)>& program) {
  if (!asks_for_ranks(arguments, kPersistent)) return std::nullopt;
  if (const std::string_view why = why_nccl_is_not_built(); !why.empty())
    throw NotBuiltError(std::string(why));
  refuse_several_processes();
  if (std::ranges::count(arguments, kPersistent) > 1)
    throw UsageError("--persistent-ranks must be given once; take one of them away");
  std::vector<std::string> of_ranks = arguments;
  const auto option = std::ranges::find(of_ranks, kPersistent);
  const std::string text = option + 1 == of_ranks.end() ? "" : *(option + 1);
  int num_ranks = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), num_ranks);
  if (error != std::errc() || text.empty() || end != text.data() + text.size())
    throw UsageError(fmt::format("--persistent-ranks must be a number, got '{}'", text));
  *option = kAttach;
  of_ranks.erase(option + 1);
  int code = kExitConforms;
  const auto ranks = run_persistent_ranks(num_ranks, [&] { return program(of_ranks); });
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const PersistentRank& own = ranks[rank];
    if (own.signal != 0 && !own.was_told) {
      print_error(fmt::format("isoshard: rank {} was ended by signal {} ({})", rank, own.signal,
                              ::strsignal(own.signal)));
    }
    const bool is_broken = own.signal != 0 || own.was_told;
    code = combine_exit_codes(code, is_broken ? static_cast<int>(kExitInfrastructure) : own.code);
  }
  return code;
}

void join_job(const std::vector<std::string>& arguments) {
  if (!asks_for_ranks(arguments, kAttach)) return;
  Joined& own = joined();
  own.job = attach_job();
  allow_threads_of_now();
  install_last_words(own.job->rank(), own.job->size());
  own.launcher = std::make_unique<AttachedLauncher>(*own.job);
  set_default_launcher(*own.launcher);
  require_equal_arguments(*own.job, arguments);
  note_launcher(own.job->size());
  if (own.job->rank() != 0) print_nothing();
}

bool reports_here() noexcept {
  return joined().job == nullptr || joined().job->rank() == 0;
}

int ranks_of_job(const ParsedOptions& options) {
  if (const AttachedJob* const job = joined().job.get(); job != nullptr) {
    check_size(options, job->size());
    return job->size();
  }
  if (options.given("persistent-ranks"))
    throw UsageError(
        "--persistent-ranks must stand on the command line, with a space before its number");
  if (options.get<bool>("attach"))
    throw UsageError("--attach must stand on the command line, got it from --config");
  if (options.given("expect-world-size"))
    throw UsageError("--expect-world-size is for --attach; add it, or leave it out");
  refuse_several_processes();
  return 0;
}

std::vector<std::string> fit_to_job(const ParsedOptions& options, std::vector<Case>& cases) {
  const int num_ranks = ranks_of_job(options);
  if (num_ranks == 0) {
    for (const Case& item : cases) {
      refuse_more_than_fork(
          item, fmt::format(": start more with mpirun -n {} and --attach", item.world_size()));
    }
    return {};
  }
  std::vector<std::string> skipped;
  int most = 0;
  std::erase_if(cases, [&](const Case& item) {
    if (item.reload_after != 0) {
      throw UsageError(
          "--reload-after needs a folder that all ranks share, which --attach does not provide; "
          "leave one of them out");
    }
    most = std::max(most, item.world_size());
    if (item.world_size() <= num_ranks) return false;
    skipped.push_back(fmt::format("skipped {}: it needs {} ranks, and the attached world has {}",
                                  item.slug(), item.world_size(), num_ranks));
    return true;
  });
  if (cases.empty() && most > 0) {
    throw UsageError(
        fmt::format("nothing selected: every case needs more than the {} ranks of the attached "
                    "world; start it with mpirun -n {}",
                    num_ranks, most));
  }
  return skipped;
}

std::string library_of_job() {
  const AttachedJob* const job = joined().job.get();
  return job == nullptr ? "" : job->library();
}

int leave_job(int code) {
  Joined& own = joined();
  if (own.launcher == nullptr) return code;
  const std::string errors = printed_errors();
  const bool ended_together = own.launcher->ended_together(errors);
  // It came to a call of which another process, whose own words and code count, did not know.
  const bool peer_ended = own.launcher->peer_ended();
  if (!ended_together && !peer_ended && own.job->rank() != 0 && !errors.empty()) {
    const std::string line =
        fmt::format("isoshard: rank {} on {}: {}", own.job->rank(), host_name(), errors);
    (void)!::write(STDERR_FILENO, line.data(), line.size());
  }
  const int worst = kCodes.at(own.job->largest(peer_ended ? 0 : severity(code)));
  // one that ended in peace while others went on has not done what it should
  code = worst == kExitConforms && own.job->largest(peer_ended ? 1 : 0) != 0 ? kExitInfrastructure
                                                                             : worst;
  own.launcher.reset();
  own.job->finish();
  return code;
}

}  // namespace isoshard
