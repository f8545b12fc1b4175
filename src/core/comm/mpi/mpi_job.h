// SPDX-License-Identifier: Apache-2.0
/// This process's part in MPI: start, end, and error codes as exceptions.
#pragma once
#include <mpi.h>

namespace isoshard {

/// Errors   InfrastructureError with MPI's own words, unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

/// Starts MPI if it is not running, and then ends it at exit: with MPI_Finalize, or after
/// end_in_abort() with MPI_Abort and exit code 4, as ranks that are lost never come to
/// MPI_Finalize.
/// Errors   as check_launcher.
void start_mpi();
void end_in_abort() noexcept;
/// What happens at exit, for a process that ends without it. Nothing after a first call.
/// Ranks    collective over the job.
void finish_mpi() noexcept;

/// Ends all processes of the job with exit code 4.
[[noreturn]] void end_job_now() noexcept;

/// Gives the core away for a moment, between two polls. Yielding takes the least time where ranks
/// are all that runs; where a yield loses the core to another program for milliseconds, sleeping
/// does, as a sleeper is woken at once.
void pause_between_polls() noexcept;

/// Polls until the request is done. For setting up and tests: no deadline, no abort.
/// Errors   InfrastructureError.
void await(MPI_Request& request);

}  // namespace isoshard
