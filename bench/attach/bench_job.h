// SPDX-License-Identifier: Apache-2.0
/// Ranks of benchmarks: forked ones, or with --attach the processes of mpirun.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/comm/attached_job.h"
#include "harness/world/attached/attached_launcher.h"

namespace isoshard {

/// The job that this program is a process of, if --attach was among its arguments.
/// default_launcher() starts its ranks, and processes but the first print nothing.
class BenchJob {
 public:
  explicit BenchJob(bool attaches);

  [[nodiscard]] bool is_attached() const noexcept { return job_ != nullptr; }
  /// Ranks that a world may have.
  [[nodiscard]] int most_ranks() const noexcept;
  /// Errors   UsageError if worlds cannot have that many ranks.
  void require_ranks(int count) const;
  /// Errors   UsageError if there are processes of several hosts, which have no clock in common.
  void require_one_host() const;
  /// Ends this process's part, and returns the code of the worst process. `words` are an error's.
  [[nodiscard]] int finish(int code, const std::string& words);

 private:
  std::unique_ptr<AttachedJob> job_;
  std::unique_ptr<AttachedLauncher> launcher_;
};

/// The main of a benchmark that makes worlds: `run` gets the arguments but --attach, and returns
/// the exit code. It is 2 or 4 after an exception, whose words are said. --help says `usage`.
///
///     int main(int argc, char** argv) {
///       return isoshard::run_bench(argc, argv, "usage: world_bench [--attach] [ROUNDS]", run);
///     }
[[nodiscard]] int run_bench(
    int argc, char** argv, std::string_view usage,
    const std::function<int(BenchJob& job, const std::vector<std::string>& arguments)>& run);

}  // namespace isoshard
