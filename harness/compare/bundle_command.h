// SPDX-License-Identifier: Apache-2.0
/// The command for those who write a recorder of their own: is this bundle what
/// docs/reference/bundle.md says?
#pragma once
#include <string>

#include "harness/cli/command.h"

namespace isoshard {

/// `bundle check FOLDER...`. `program`: what examples begin with, such as "isoshard".
[[nodiscard]] Command bundle_command(const std::string& program);

}  // namespace isoshard
