// SPDX-License-Identifier: Apache-2.0
/// Command dispatch, help, and the mapping of exceptions to exit codes.
#include "harness/cli/command.h"

#include <fmt/format.h>
#include <fmt/ostream.h>

#include <cstdio>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "harness/verdict/exit_code.h"

#ifndef ISOSHARD_VERSION
#define ISOSHARD_VERSION "unknown"
#endif

namespace isoshard {
namespace {

// Control characters of arguments and file names as \xHH, so that none reaches a terminal. Lines
// and UTF-8 stay.
std::string without_controls(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    // C1 controls (U+0080 to U+009F) are C2 80 to C2 9F in UTF-8.
    const bool is_c1 =
        byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0;
    const bool is_control = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f || is_c1;
    out += is_control ? fmt::format("\\x{:02x}", byte) : std::string(1, text[i]);
  }
  return out;
}

namespace po = boost::program_options;

constexpr const char* kExitCodes =
    "exit codes: 0 conforms, 1 diverges or vacuous, 2 usage, 3 bad input file, 4 infrastructure "
    "(crash, hang, incomplete),\n"
    "            5 golden missing, stale or refused, 130/143 interrupted\n";

void print_overview(const ProgramWords& program, std::span<const Command> commands) {
  fmt::print("{}\n\nusage: {} COMMAND [options]\n\ncommands\n", program.about, program.name);
  for (const auto& command : commands) fmt::print("  {:<10} {}\n", command.name, command.summary);
  if (!program.test.empty()) fmt::print("  {:<10} {}\n", "test", program.test);
  fmt::print("\nexample: {0} {1}\n         {0} COMMAND --help\n\n{2}", program.name,
             program.example, kExitCodes);
}

void print_help(const ProgramWords& program, const Command& command, const OptionTable& table) {
  fmt::print("{}\n\nusage: {} {}\n\n{}\nexamples\n{}\n\n{}", command.summary, program.name,
             command.usage, help_text(table), command.examples, kExitCodes);
}

int run_one(const ProgramWords& program, const Command& command,
            const std::vector<std::string>& arguments) {
  OptionTable table;
  auto add = table.group("general");
  add("help,h", po::bool_switch(), "show this help");
  add("config", po::value<std::string>(), "read options from a JSON file {\"tp\": 2, ...}");
  add("print-config", po::bool_switch(), "show the value and origin of every option, and exit");
  command.declare(table);
  const ParsedOptions parsed = parse_options(table, arguments);
  int code = kExitConforms;
  if (parsed.get<bool>("help")) {
    print_help(program, command, table);
  } else if (parsed.get<bool>("print-config")) {
    fmt::print("{}", render_config(table, parsed));
  } else {
    code = command.run(parsed);
  }
  // What is buffered is written here, where a full disk can still be told.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw InfrastructureError("cannot write to standard output; is its disk full?");
  return code;
}

}  // namespace

int run_command_line(const ProgramWords& program, std::span<const Command> commands,
                     const std::vector<std::string>& arguments) {
  try {
    if (arguments.empty()) {
      print_overview(program, commands);
      return kExitUsage;
    }
    const std::string& name = arguments.front();
    if (name == "--help" || name == "-h" || name == "help") {
      print_overview(program, commands);
      return kExitConforms;
    }
    if (name == "--version" || name == "version") {
      fmt::print("{} {}\n", program.name, ISOSHARD_VERSION);
      return kExitConforms;
    }
    std::vector<std::string> known;
    for (const auto& command : commands) {
      if (command.name == name)
        return run_one(program, command, {arguments.begin() + 1, arguments.end()});
      known.push_back(command.name);
    }
    throw UsageError(fmt::format("unknown command '{}'{}; '{} --help' lists the commands", name,
                                 did_you_mean(name, known), program.name));
  } catch (const std::exception& error) {
    std::fflush(stdout);
    fmt::print(stderr, "{}: {}\n", program.name, without_controls(error.what()));
    return exit_code_of(error);
  }
}

int run_command_line(std::span<const Command> commands, const std::vector<std::string>& arguments) {
  static const ProgramWords kIsoshard{
      "isoshard",
      "isoshard proves that a parallel training implementation computes what one process computes.",
      "build everything and run all tests (done by the ./isoshard launcher)",
      "verify --preset small"};
  return run_command_line(kIsoshard, commands, arguments);
}

}  // namespace isoshard
