// SPDX-License-Identifier: Apache-2.0
/// The command that measures how far a stored reference moves.
#pragma once
#include <string>

#include "harness/cli/command.h"

namespace isoshard {

/// `respond REFERENCE PERTURBED...`. `program`: what examples begin with, such as "isoshard".
[[nodiscard]] Command respond_command(const std::string& program);

}  // namespace isoshard
