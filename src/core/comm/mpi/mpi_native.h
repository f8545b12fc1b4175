// SPDX-License-Identifier: Apache-2.0
/// Order native: MPI's own reductions, for all dtypes.
#pragma once
#include <mpi.h>

#include <cstdint>
#include <functional>

#include "core/comm/communicator.h"

namespace isoshard {

/// How to wait for a request of MPI.
using WaitForRequest = std::function<void(MPI_Request& request)>;

/// In place, with MPI_Iallreduce. fp16, bf16 and bool, which MPI lacks, are types and operations of
/// our own: a 16-bit sum is rounded at each of MPI's additions. avg divides afterwards: floats in
/// their accumulator, integers towards zero.
///
/// Ranks        collective over `comm`.
/// Errors       InfrastructureError, and what `wait` throws. MPI goes on with its reduction then,
///              on a copy of the data, which is never given back.
/// Determinism  as MPI's; it depends on the size of the data and the number of ranks. min and max
///              of a NaN are not defined by MPI.
void native_all_reduce(MPI_Comm comm, Buffer data, Reduction reduction, const WaitForRequest& wait);

/// Reduces `input` on one rank, into its `output`, with MPI_Ireduce.
void native_reduce(MPI_Comm comm, ConstBuffer input, Buffer output, int root, Reduction reduction,
                   const WaitForRequest& wait);

/// Reduces a block of equal size for each rank, with MPI_Ireduce_scatter_block.
/// Requires    output.count below 2^30.
void native_reduce_scatter(MPI_Comm comm, ConstBuffer input, Buffer output, Reduction reduction,
                           const WaitForRequest& wait);
inline constexpr std::int64_t kMostNativeElements = std::int64_t{1} << 30;

}  // namespace isoshard
