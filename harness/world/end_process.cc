// SPDX-License-Identifier: Apache-2.0
/// Flush, check, _exit.
#include "harness/world/end_process.h"

#include <unistd.h>

#include <cstdio>
#include <iostream>

// Present when the program is built with coverage or a leak checker; both work at a usual exit
// only, unless they are called.
extern "C" {
__attribute__((weak)) void __gcov_dump();
__attribute__((weak)) int __lsan_do_recoverable_leak_check();
}

namespace isoshard {
namespace {

constexpr int kLeakExitCode = 23;

}  // namespace

void end_process(int code) {
  std::cout.flush();
  std::clog.flush();
  std::fflush(nullptr);
  if (&__gcov_dump != nullptr) __gcov_dump();
  if (&__lsan_do_recoverable_leak_check != nullptr && __lsan_do_recoverable_leak_check() != 0)
    code = kLeakExitCode;
  ::_exit(code);
}

}  // namespace isoshard
