// SPDX-License-Identifier: Apache-2.0
/// Worlds whose ranks are processes that mpirun or srun has started.
#pragma once
#include <memory>
#include <string>
#include <string_view>

#include "core/comm/attached_job.h"
#include "harness/world/launcher.h"

namespace isoshard {

/// Runs worlds on the processes of a job, each of which makes the same launches in the same order
/// (Peers), and gives every process every report.
///
/// A world of one rank is forked from process 0; or, where WorldOptions::on_each_host says that it
/// computes the same everywhere, as the reference does, from the first process of each host
/// (hosts_of_job.h). The others wait for its report, which is process 0's; if another host's rank
/// failed, and process 0's did not, it is that one's. Where processes may not fork
/// (AttachedJob::may_fork), these worlds run in the same processes, one after the other as they are
/// waited for. A larger world runs in the processes
/// themselves: rank r is process r, and processes that have no rank wait. So an exception ends a
/// world, as on forked ranks, but a crash ends the job: its signal handler says where, and leaves
/// with exit code 4 (last_words.h).
///
/// Requires     lives until the job is finished.
/// Guarantees   WorldReport is the same on all processes. No rank waits in one call for longer than
///              WorldOptions::deadline: its world fails and names who is missing. A rank that has
///              ended waits for the others for twice that and 2 s, and then ends the job with exit
///              code 4 and a line that says why.
/// Errors       launch: UsageError for more ranks than the job has, or for a transport. wait:
///              CommError when a process has left the common way.
///
///     AttachedLauncher launcher(*job);
///     set_default_launcher(launcher);
class AttachedLauncher final : public Launcher {
 public:
  /// Ranks   collective over the job.
  explicit AttachedLauncher(AttachedJob& job);
  /// As if this process ran on the host of that name.
  AttachedLauncher(AttachedJob& job, const std::string& host);
  ~AttachedLauncher() override;
  AttachedLauncher(const AttachedLauncher&) = delete;
  AttachedLauncher& operator=(const AttachedLauncher&) = delete;

  [[nodiscard]] std::string_view name() const noexcept override { return "attached"; }
  [[nodiscard]] bool shares_memory() const noexcept override { return false; }
  [[nodiscard]] Peers* peers() noexcept override;
  [[nodiscard]] std::unique_ptr<RunningWorld> launch(WorldOptions options, Body body) override;
  /// Whether all processes came to their end together, and with the same words. Those that are
  /// still elsewhere are released: their calls throw a CommError that names both places. Ranks
  /// called once by each process, at its end.
  [[nodiscard]] bool ended_together(std::string_view words);
  /// Whether a call of this process failed because another had come to its end meanwhile: what the
  /// others say about it then is no cause.
  [[nodiscard]] bool peer_ended() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isoshard
