// SPDX-License-Identifier: Apache-2.0
/// Makes a process fit to fork ranks that compute with ATen.
#pragma once

namespace isoshard {

/// Sets ATen to one thread (an OpenMP pool would hang in ranks) and the allocator to keep what it
/// has. Call before the first tensor operation of the process.
void make_controller();

/// One toy forward and backward in fp32 and bf16, so that ranks inherit loaded kernels instead of
/// loading them each. Does nothing where LibTorch has devices (core/tensor/device.h).
void warm_up_kernels();

}  // namespace isoshard
