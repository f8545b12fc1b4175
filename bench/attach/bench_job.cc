// SPDX-License-Identifier: Apache-2.0
/// One argument and the launcher that it chooses.
#include "bench/attach/bench_job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "core/base/error.h"
#include "harness/world/attached/last_words.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/warm_up.h"

namespace isoshard {
namespace {

constexpr int kUsage = 2, kInfrastructure = 4;
constexpr int kMostForked = 16;

bool has(const std::vector<std::string>& arguments, std::string_view argument) {
  return std::ranges::find(arguments, argument) != arguments.end();
}

void print_nothing_here() {
  const int nothing = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (nothing < 0) return;
  ::dup2(nothing, STDOUT_FILENO);
  ::close(nothing);
}

void refuse_several_processes() {
  const char* const size = std::getenv("OMPI_COMM_WORLD_SIZE");
  if (size == nullptr || std::atoi(size) < 2) return;
  throw UsageError(
      fmt::format("mpirun started {} processes, each of which would run all ranks of its own; add "
                  "--attach, or start one process",
                  size));
}

}  // namespace

BenchJob::BenchJob(bool attaches) {
  if (!attaches) {
    refuse_several_processes();
    return;
  }
  job_ = attach_mpi_job();
  allow_threads_of_now();
  install_last_words(job_->rank(), job_->size());
  launcher_ = std::make_unique<AttachedLauncher>(*job_);
  set_default_launcher(*launcher_);
  if (job_->rank() != 0) print_nothing_here();
}

int BenchJob::most_ranks() const noexcept {
  return is_attached() ? job_->size() : kMostForked;
}

void BenchJob::require_ranks(int count) const {
  if (count <= most_ranks()) return;
  throw UsageError(fmt::format("a world of this benchmark has {} ranks, got {} at most{}", count,
                               most_ranks(), is_attached() ? "; start more with mpirun -n" : ""));
}

void BenchJob::require_one_host() const {
  if (!is_attached() || launcher_->peers()->hosts().count() == 1) return;
  throw UsageError(
      fmt::format("times of one clock are compared, so all ranks must run on one "
                  "host, got {}; give mpirun one",
                  launcher_->peers()->hosts().count()));
}

int BenchJob::finish(int code, const std::string& words) {
  if (!is_attached()) {
    if (!words.empty()) fmt::print(stderr, "{}\n", words);
    return code;
  }
  const bool is_said_by_first = launcher_->ended_together(words);
  if (!words.empty() && (job_->rank() == 0 || !is_said_by_first))
    fmt::print(stderr, "rank {} on {}: {}\n", job_->rank(), host_name(), words);
  code = static_cast<int>(job_->largest(static_cast<std::uint64_t>(code)));
  job_->finish();
  return code;
}

int run_bench(
    int argc, char** argv, std::string_view usage,
    const std::function<int(BenchJob& job, const std::vector<std::string>& arguments)>& run) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  if (has(arguments, "--help")) {
    fmt::print("{}\n", usage);
    return 0;
  }
  make_controller();
  try {
    BenchJob job(std::erase(arguments, "--attach") > 0);
    int code = kInfrastructure;
    std::string words;
    try {
      code = run(job, arguments);
    } catch (const UsageError& error) {
      code = kUsage;
      words = fmt::format("{}\n{}", error.what(), usage);
    } catch (const std::exception& error) {
      words = error.what();
    }
    return job.finish(code, words);
  } catch (const UsageError& error) {
    fmt::print(stderr, "{}\n{}\n", error.what(), usage);
    return kUsage;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return kInfrastructure;
  }
}

}  // namespace isoshard
