// SPDX-License-Identifier: Apache-2.0
/// Command dispatch, help, and the mapping of exceptions to exit codes.
#include "harness/cli/command.h"

#include <fmt/format.h>
#include <fmt/ostream.h>

#include <cstdio>
#include <sstream>

#include "base/error.h"
#include "base/suggest.h"
#include "harness/cli/exit_code.h"

#ifndef ISOSHARD_VERSION
#define ISOSHARD_VERSION "unknown"
#endif

namespace isoshard {
namespace {

namespace po = boost::program_options;

constexpr const char* kExitCodes =
    "exit codes: 0 conforms, 1 diverges or vacuous, 2 usage, 3 bad input file, 4 infrastructure (crash, hang, incomplete),\n"
    "            5 golden missing, stale or refused, 130/143 interrupted\n";

void print_overview(std::span<const Command> commands) {
  fmt::print("isoshard proves that a parallel training implementation computes what one process computes.\n\n");
  fmt::print("usage: isoshard COMMAND [options]\n\ncommands\n");
  for (const auto& command : commands) fmt::print("  {:<10} {}\n", command.name, command.summary);
  fmt::print("  {:<10} {}\n", "test", "build everything and run all tests (done by the ./isoshard launcher)");
  fmt::print("\nexample: isoshard verify --preset small\n         isoshard COMMAND --help\n\n{}", kExitCodes);
}

void print_help(const Command& command, const OptionTable& table) {
  std::ostringstream options;
  options << table.options;
  fmt::print("{}\n\nusage: isoshard {}\n\n{}\nexamples\n{}\n\n{}", command.summary, command.usage, options.str(), command.examples,
             kExitCodes);
}

int run_one(const Command& command, const std::vector<std::string>& arguments) {
  OptionTable table;
  table.options.add_options()("help,h", po::bool_switch(), "show this help");
  table.options.add_options()("config", po::value<std::string>(), "read options from a JSON file {\"tp\": 2, ...}");
  table.options.add_options()("print-config", po::bool_switch(), "show every option's value and origin, and stop");
  command.declare(table);
  const ParsedOptions parsed = parse_options(table, arguments);
  if (parsed.get<bool>("help")) {
    print_help(command, table);
    return kExitConforms;
  }
  if (parsed.get<bool>("print-config")) {
    fmt::print("{}", render_config(table, parsed));
    return kExitConforms;
  }
  return command.run(parsed);
}

}  // namespace

int run_command_line(std::span<const Command> commands, const std::vector<std::string>& arguments) {
  try {
    if (arguments.empty()) {
      print_overview(commands);
      return kExitUsage;
    }
    const std::string& name = arguments.front();
    if (name == "--help" || name == "-h" || name == "help") {
      print_overview(commands);
      return kExitConforms;
    }
    if (name == "--version" || name == "version") {
      fmt::print("isoshard {}\n", ISOSHARD_VERSION);
      return kExitConforms;
    }
    std::vector<std::string> known;
    for (const auto& command : commands) {
      if (command.name == name) return run_one(command, {arguments.begin() + 1, arguments.end()});
      known.push_back(command.name);
    }
    throw UsageError(fmt::format("unknown command '{}'{}; 'isoshard --help' lists the commands", name, did_you_mean(name, known)));
  } catch (const std::exception& error) {
    std::fflush(stdout);
    fmt::print(stderr, "isoshard: {}\n", error.what());
    return exit_code_of(error);
  }
}

}  // namespace isoshard
