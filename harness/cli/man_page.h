// SPDX-License-Identifier: Apache-2.0
/// Manual pages and shell completion, made from what commands declare.
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "harness/cli/command.h"

namespace isoshard {

/// The options of a command as run_command_line() accepts them.
[[nodiscard]] OptionTable options_of(const Command& command);

/// A page for man(1), in man(7)'s macros: of the program, or of one of its commands.
///
/// Determinism   a function of its arguments.
[[nodiscard]] std::string man_page(const ProgramWords& program, std::span<const Command> commands);
[[nodiscard]] std::string man_page(const ProgramWords& program, const Command& command);

/// A script for the shell "bash", "zsh" or "fish" that completes commands and their options; where
/// an option takes a value, names of files.
/// Errors   UsageError for another shell.
[[nodiscard]] std::string completion_script(const ProgramWords& program,
                                            std::span<const Command> commands,
                                            std::string_view shell);

}  // namespace isoshard
