// SPDX-License-Identifier: Apache-2.0
/// One command of the program: its name, what it accepts, an example, and what it does.
#pragma once
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "harness/cli/options.h"

namespace isoshard {

struct Command {
  std::string name;
  std::string summary;   ///< one line
  std::string usage;     ///< "verify [options]"
  std::string examples;  ///< shown by --help; at least one
  /// Adds its options; --help, --config, --print-config are there already.
  std::function<void(OptionTable&)> declare;
  /// Returns an exit code; throws the project's errors.
  std::function<int(const ParsedOptions&)> run;
  /// The exit code is a verdict, which stands even if standard output cannot be written. Else the
  /// output is the product, and losing it is exit code 4.
  bool judges = false;
  /// The heading that --help lists it under.
  std::string group = "commands";
};

/// What a program says of itself.
struct ProgramWords {
  std::string name;     ///< "isoshard"
  std::string about;    ///< one line
  std::string test;     ///< a line for a command that is not in the program; may be empty
  std::string example;  ///< a command line, without the program's name
  /// "LibTorch" -> "2.11.0": what reports say the program is made of, beside its own version.
  std::map<std::string, std::string> versions = {};
  /// Commands of another program of the project, and what to do to run them.
  std::map<std::string, std::string> elsewhere = {};
  /// As OptionTable::refuses_unknown_variables.
  bool refuses_unknown_variables = false;
};

/// Finds the command that arguments[0] names, parses the rest and runs it. Prints --help,
/// --version, --print-config. An exception is printed to standard error as "NAME: ..." and mapped
/// to its exit code.
[[nodiscard]] int run_command_line(const ProgramWords& program, std::span<const Command> commands,
                                   const std::vector<std::string>& arguments);
/// Of the program isoshard.
[[nodiscard]] int run_command_line(std::span<const Command> commands,
                                   const std::vector<std::string>& arguments,
                                   std::map<std::string, std::string> versions = {});

}  // namespace isoshard
