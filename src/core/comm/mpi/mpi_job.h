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

}  // namespace isoshard
