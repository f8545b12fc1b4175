// SPDX-License-Identifier: Apache-2.0
/// Example values with which docs/reference/causes.md shows the texts of causes.
#pragma once
#include "harness/ids/cause.h"
#include "harness/ids/named_values.h"

namespace isoshard {

/// A value for each placeholder of the cause's text that is not optional. One without an example
/// has its name in angle brackets.
[[nodiscard]] NamedValues readable_examples_of(CauseId id);

}  // namespace isoshard
