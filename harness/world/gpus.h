// SPDX-License-Identifier: Apache-2.0
/// How many GPUs ranks of this program can use.
#pragma once
#include <string>

namespace isoshard {

struct GpuCount {
  int count = 0;
  std::string why_none;  ///< a clause, where count is 0
};

/// Asks LibTorch in a child process, once: a process that has started CUDA cannot fork ranks that
/// use it. The device of tests (harness/testing/device) counts as one.
[[nodiscard]] const GpuCount& count_gpus();

}  // namespace isoshard
