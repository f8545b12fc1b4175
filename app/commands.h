// SPDX-License-Identifier: Apache-2.0
/// The commands of the program, one function each.
#pragma once
#include "harness/cli/command.h"

namespace isoshard {

[[nodiscard]] Command verify_command();
[[nodiscard]] Command train_command();
[[nodiscard]] Command converge_command();
[[nodiscard]] Command plot_command();
[[nodiscard]] Command compare_command();
[[nodiscard]] Command oracle_command();
[[nodiscard]] Command golden_command();
[[nodiscard]] Command experiment_command();
[[nodiscard]] Command bench_command();
[[nodiscard]] Command faults_command();
[[nodiscard]] Command report_command();
[[nodiscard]] Command list_command();
[[nodiscard]] Command explain_command();
[[nodiscard]] Command doctor_command();

}  // namespace isoshard
