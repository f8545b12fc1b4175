// SPDX-License-Identifier: Apache-2.0
/// Examples of commands as --help and manual pages print them.
#pragma once
#include <string>
#include <string_view>

namespace isoshard {

/// Each example with what it does, within 80 columns: beside it if all fit so, else below it. A
/// command that is longer goes on behind a backslash.
/// `examples`   a line each: the command and, three or more blanks behind it, what it does; lines
///              that begin with 20 blanks go on with that, and a command goes on behind a
///              backslash.
[[nodiscard]] std::string examples_in_columns(std::string_view examples);

}  // namespace isoshard
