// SPDX-License-Identifier: Apache-2.0
/// Marks functions that kernels of CUDA and code of the CPU both call, so that tests of the CPU
/// hold the very body that runs on a GPU. Nothing where nvcc does not compile.
#pragma once

#ifdef __CUDACC__
#define ISOSHARD_HOST_DEVICE __host__ __device__
#else
#define ISOSHARD_HOST_DEVICE
#endif
