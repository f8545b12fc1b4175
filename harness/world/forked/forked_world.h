// SPDX-License-Identifier: Apache-2.0
/// Worlds of forked processes: starts and watches ranks, collects their results, and reports what
/// went wrong.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "harness/world/rank.h"

namespace isoshard {

using CommDecorator =
    std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator> inner, int rank)>;

struct WorldOptions {
  int size = 1;  ///< 1 to 16
  /// Shown in reports, for example the case's slug.
  std::string name{};
  std::chrono::milliseconds deadline{60'000};  ///< from start to the last rank's end
  CommDecorator decorate{};                    ///< a fault, or nothing
  /// The order of reductions in all groups. kNative is a UsageError, because shm does not have it.
  ReductionOrder order = ReductionOrder::kOrdered;
};

enum class RankEnd : std::uint8_t {
  kReturned,  ///< body returned and the rank said goodbye
  kThrew,     ///< body threw; message holds what()
  kReleased,  ///< a collective failed because another rank was lost or the world was aborted
  kExited,    ///< the process ended by exit() before the body returned
  kSignaled,  ///< killed by a signal
  kHung,      ///< still running at the deadline; killed by the controller
  kProtocol,  ///< its result channel carried something that no rank sends; killed by the controller
};

/// A failed EXPECT_ or ASSERT_ inside a rank.
struct ForwardedFailure {
  std::string file;
  int line = 0;
  std::string text;
  bool fatal = false;
};

struct RankReport {
  int rank = 0;
  RankEnd end = RankEnd::kReturned;
  int code = 0;         ///< exit status or signal number
  std::string message;  ///< what(), or the signal's name and backtrace
  std::string where;    ///< "in all_reduce #7 (...)", "after ...", "before its first collective"
  std::string phase;
  std::string standard_output;  ///< captured, head and tail when long
  std::string standard_error;
  std::vector<std::byte> result;
  std::vector<ForwardedFailure> failures;
  long peak_rss_kib = 0;
};

struct WorldReport {
  std::string name;
  std::vector<RankReport> ranks{};
  int culprit = -1;          ///< the rank that failed first; -1: none, or no single one
  std::string cause{};       ///< one sentence about what ended the world early; empty when ok
  bool interrupted = false;  ///< SIGINT or SIGTERM came; ranks were stopped

  /// Every rank returned, none forwarded a failure, nothing interrupted it.
  [[nodiscard]] bool ok() const noexcept;
  /// One paragraph that names the rank that failed first, how, in which collective and phase, with
  /// its captured output and a line for each other rank. Empty when ok.
  [[nodiscard]] std::string describe() const;
};

/// A running world. Several worlds may run at once.
///
/// Requires     the calling process is single-threaded (fork), and at::set_num_threads(1) was
///              called before the first op.
/// Guarantees   every rank is a fresh process forked from the caller; when wait() has returned (or
///              the object is destroyed) no process of the world is left, nor one that a rank
///              started (a leaked process is killed and named, and the report is not ok); ranks die
///              with the controller (parent-death signal). The caller adopts orphans from then on
///              (prctl(2), subreaper).
/// Errors       InfrastructureError that names the limit if processes, descriptors or shared memory
///              cannot be had; UsageError for a size outside 1..16 or a caller with several
///              threads.
///
///     ForkedWorld world({.size = 2, .name = "sum"}, [](Rank& rank) { ... });
///     WorldReport report = world.wait();
class ForkedWorld {
 public:
  using Body = std::function<void(Rank&)>;
  ForkedWorld(WorldOptions options, Body body);
  ForkedWorld(ForkedWorld&&) noexcept;
  ForkedWorld& operator=(ForkedWorld&&) noexcept;
  ~ForkedWorld();
  /// Waits for all ranks to end, serving every other running world of this process meanwhile.
  /// Called once.
  [[nodiscard]] WorldReport wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Runs one world to its end.
[[nodiscard]] WorldReport run_forked(WorldOptions options, ForkedWorld::Body body);

/// Throws InfrastructureError(report.describe()) unless report.ok().
void require_ok(const WorldReport& report);

}  // namespace isoshard
