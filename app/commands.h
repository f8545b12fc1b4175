// SPDX-License-Identifier: Apache-2.0
/// The commands of the program, one function each.
#pragma once
#include <functional>

#include "harness/cli/command.h"

namespace isoshard {

struct Curve;
struct CurveBounds;

[[nodiscard]] Command verify_command();
[[nodiscard]] Command train_command();
[[nodiscard]] Command plot_command();
/// `bounds_of` says what is allowed of a loss curve; empty: what is usual.
[[nodiscard]] Command compare_command(std::function<CurveBounds(const Curve&)> bounds_of = {});
[[nodiscard]] Command oracle_command();
[[nodiscard]] Command golden_command();
[[nodiscard]] Command experiment_command();
[[nodiscard]] Command list_command();
[[nodiscard]] Command explain_command();
[[nodiscard]] Command doctor_command();

}  // namespace isoshard
