// SPDX-License-Identifier: Apache-2.0
/// What is asked of a world of ranks, and what is reported of it, however its ranks are started.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/comm/communicator.h"
#include "core/comm/transport.h"
#include "harness/world/rank.h"

namespace isoshard {

struct WorldOptions {
  int size = 1;  ///< 1 to 16 where ranks share memory, to 1024 on processes of mpirun
  /// Shown in reports, for example the case's slug.
  std::string name{};
  /// Of each rank's process, as ps shows it (harness/world/process_name.h); empty: the caller's.
  std::string process_name{};
  /// For how long no rank may get any further: enter or finish a collective, enter a phase, send
  /// a result, or end. Time in which the controller itself did not run (a suspended host, SIGSTOP)
  /// does not count, and the deadline begins anew after it.
  std::chrono::milliseconds deadline{60'000};
  CommDecorator decorate{};  ///< a fault, or nothing
  /// The order of reductions in all groups. kNative is a UsageError, because shm does not have it.
  ReductionOrder order = ReductionOrder::kOrdered;
  Transport transport{};  ///< without `make`: shm
  /// Of a world of one rank that computes the same wherever and whenever it runs, and writes no
  /// file: on processes of several hosts each host runs it, instead of process 0's alone.
  bool on_each_host = false;
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
  bool interrupted = false;  ///< SIGINT, SIGTERM or SIGHUP came; ranks were stopped
  /// The FileError of a rank, or that of an input that changed; empty if there was none.
  std::string file_error{};
  /// For how long the controller did not run while it should have watched its ranks.
  std::chrono::milliseconds host_pause{0};

  /// Every rank returned, none forwarded a failure, nothing interrupted it.
  [[nodiscard]] bool ok() const noexcept;
  /// One paragraph that names the rank that failed first, how, in which collective and phase, with
  /// its captured output and a line for each other rank. Empty when ok.
  [[nodiscard]] std::string describe() const;
};

/// Throws InfrastructureError(report.describe()) unless report.ok(), or FileError if a rank met
/// one.
void require_ok(const WorldReport& report);

}  // namespace isoshard
