// SPDX-License-Identifier: Apache-2.0
/// The command that judges stored runs. It needs no subject, and no LibTorch.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "harness/cli/command.h"
#include "harness/stats/comparer.h"

namespace isoshard {

/// As curve_bounds takes them. What they refer to must outlive the command.
using CurveCeilings = std::span<const std::pair<std::string_view, double>>;

/// `compare REFERENCE ACTUAL`: two bundles, two loss curves, or a folder of dumped runs.
/// `on_gpu` makes what compares with --device cuda, and throws a UsageError that says why where no
/// GPU can be used; empty: this program never can.
[[nodiscard]] Command compare_command(std::string examples, CurveCeilings ceilings,
                                      ComparerMaker on_gpu = {});

}  // namespace isoshard
