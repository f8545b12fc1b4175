// SPDX-License-Identifier: Apache-2.0
/// Options of commands whose ranks may be processes of mpirun or srun, and the job that this
/// process then belongs to.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/cli/options.h"

namespace isoshard {

/// Adds --attach, --persistent-ranks and --expect-world-size.
void declare_attach_options(OptionTable& table);

/// Where --persistent-ranks N is among the arguments: forks N processes that live for the whole run
/// (harness/world/persistent), each of which runs `program` with --attach in its place, and returns
/// the most severe of their exit codes. Otherwise nothing.
/// Ranks    called once, at the start of the program, before any thread.
/// Errors   as run_persistent_ranks; UsageError for no number; NotBuiltError in a program without
///          NCCL.
[[nodiscard]] std::optional<int> run_on_persistent_ranks(
    const std::vector<std::string>& arguments,
    const std::function<int(const std::vector<std::string>&)>& program);

/// Joins the launcher's job if --attach is among the arguments, before any of them is read, so that
/// from here on all processes do the same and one prints. Without it nothing happens. A program
/// with NCCL meets through that, whoever started its processes; others through MPI.
/// Ranks    collective over the job; called once, at the start of the program.
/// Errors   as attach_nccl_job or attach_mpi_job; UsageError where processes have other arguments.
void join_job(const std::vector<std::string>& arguments);

/// Whether this process prints and writes files: it belongs to no job, or is its first.
[[nodiscard]] bool reports_here() noexcept;

/// Checks the job against the options, and takes the cases that need more ranks than it has off the
/// list. Returns a line for each of them.
/// Errors   UsageError where no case is left; where the job has not the ranks that
///          --expect-world-size says; where mpirun started several processes and --attach is not
///          given; for --attach with settings that need ranks of one host.
[[nodiscard]] std::vector<std::string> fit_to_job(const ParsedOptions& options,
                                                  std::vector<Case>& cases);

/// The same for commands whose cases are not on a command line: returns how many ranks a case may
/// have, 0 without --attach.
/// Errors   as above, but for the cases.
[[nodiscard]] int ranks_of_job(const ParsedOptions& options);

/// What the library below the job calls itself; empty without a job.
[[nodiscard]] std::string library_of_job();

/// Errors   UsageError that ends with `way_out` if the case has more ranks than can be forked.
void refuse_more_than_fork(const Case& item, std::string_view way_out);

/// For a command that has no --attach, by its name; without one for a run that was not told to.
/// Errors   UsageError where mpirun or srun started several processes.
void refuse_several_processes(std::string_view command = {});

/// Agrees on the exit code: the most severe one of all processes. A process whose error the one
/// that prints does not share tells its own. Ranks    collective over the job; the last that a
/// process does.
[[nodiscard]] int leave_job(int code);

}  // namespace isoshard
