// SPDX-License-Identifier: Apache-2.0
/// Test programs whose ranks are processes of mpirun: mpirun -n 4 PROGRAM --attach.
#pragma once
#include <functional>
#include <memory>

#include "core/comm/attached_job.h"
#include "harness/world/attached/attached_launcher.h"

namespace isoshard {

/// Joins a job, as attach_mpi_job.
using AttachJob = std::function<std::unique_ptr<AttachedJob>()>;

/// Every process runs the same tests in the same order, and worlds are made of all of them. Process
/// 0 prints and writes the report; the others print their failures only. All leave with one code.
///
/// Ranks      collective over the job; made once, at the start of a program.
/// Guarantees a test whose world has more ranks than the job, or a transport of its own, is
///            skipped, with the reason. One random seed shuffles the tests of all processes.
class AttachedTests {
 public:
  /// Joins the job if --attach is among the arguments, and takes it and --expect-world-size=N away.
  /// Null without it.
  /// Errors   as attach_mpi_job; UsageError if the job has another size than N.
  [[nodiscard]] static std::unique_ptr<AttachedTests> join(int& argc, char** argv,
                                                           const AttachJob& attach_job);
  explicit AttachedTests(std::unique_ptr<AttachedJob> job);
  ~AttachedTests();
  AttachedTests(const AttachedTests&) = delete;
  AttachedTests& operator=(const AttachedTests&) = delete;

  /// Between InitGoogleTest and RUN_ALL_TESTS.
  /// Errors   UsageError if the processes have other tests or flags.
  void prepare();
  /// The largest of all processes' codes, 4 if no test had a world of several ranks. The last that
  /// a process does with the job.
  [[nodiscard]] int finish(int code);

 private:
  class FittingWorlds;

  std::unique_ptr<AttachedJob> job_;
  std::unique_ptr<AttachedLauncher> launcher_;
  std::unique_ptr<FittingWorlds> fitting_;
};

}  // namespace isoshard
