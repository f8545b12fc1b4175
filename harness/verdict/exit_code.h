// SPDX-License-Identifier: Apache-2.0
/// The exit codes of every command, and the one place where causes are mapped to them.
#pragma once
#include <exception>

#include "harness/verdict/verdict.h"

namespace isoshard {

enum ExitCode : int {
  kExitConforms = 0,
  kExitDiverges = 1,        ///< diverges or vacuous
  kExitUsage = 2,           ///< wrong flags or settings; also: nothing selected
  kExitBadInput = 3,        ///< a malformed input file
  kExitInfrastructure = 4,  ///< crash, hang, exception, resources, incomplete
  kExitGolden = 5,          ///< golden missing, stale or refused
  kExitHangup = 129,        ///< SIGHUP
  kExitInterrupted = 130,   ///< SIGINT (143: SIGTERM)
  kExitTerminated = 143,
};

[[nodiscard]] int exit_code_of(Status status) noexcept;
/// The exit code of an exception. Any that is not one of the project's errors counts as
/// infrastructure.
[[nodiscard]] int exit_code_of(const std::exception& error) noexcept;
/// The code of two results together: 130, 143, 129 > 4 > 2 > 3 > 1 > 5 > 0. (2 and 3 mostly end a
/// command before it has results; where one of several cases ends so, its code counts.)
[[nodiscard]] int combine_exit_codes(int a, int b) noexcept;

}  // namespace isoshard
