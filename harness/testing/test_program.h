// SPDX-License-Identifier: Apache-2.0
/// What the main of a test program with ranks calls.
#pragma once
#include "harness/testing/attached_tests.h"

namespace isoshard {

/// Runs the selected tests. This process is the controller of forked worlds, or, with --attach, one
/// process of the job that `attach_job` joins. Returns the program's exit code: 0, GoogleTest's 1,
/// 2 if nothing ran, 3 if the suite's labels are wrong, 4 for failed infrastructure.
[[nodiscard]] int run_test_program(int argc, char** argv, const AttachJob& attach_job);

}  // namespace isoshard
