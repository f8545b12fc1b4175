// SPDX-License-Identifier: Apache-2.0
/// The end of a process that leaves its memory to the kernel.
#pragma once

namespace isoshard {

/// Ends the process with `code` without destroying global objects: LibTorch's tables alone take 0.1
/// s. Flushes buffered output, and calls coverage and leak checkers where the program is built with
/// them; if there are leaks, the code is 23.
[[noreturn]] void end_process(int code);

}  // namespace isoshard
