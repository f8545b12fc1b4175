// SPDX-License-Identifier: Apache-2.0
/// Command dispatch, help, and the mapping of exceptions to exit codes.
#include "harness/cli/command.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <set>
#include <sstream>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/base/suggest.h"
#include "harness/cli/examples.h"
#include "harness/cli/man_page.h"
#include "harness/cli/output.h"
#include "harness/report/text/hanging.h"
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
    "exit codes: 0 conforms, 1 diverges or vacuous, 2 usage, 3 bad input file,\n"
    "            4 infrastructure (crash, hang, incomplete), 5 golden missing, stale\n"
    "            or refused, 130/143 interrupted (129: hangup)\n";

/// Name and text in two columns.
void print_in_columns(const std::string& name, const std::string& text) {
  print("{}", hanging(fmt::format("  {:<10} ", name), text, terminal_columns(kLineWidth)));
}

void print_overview(const ProgramWords& program, std::span<const Command> commands) {
  print("{}\n\nusage: {} COMMAND [options]\n", program.about, program.name);
  std::string group;
  for (const auto& command : commands) {
    if (command.group != group) print("\n{}\n", group = command.group);
    print_in_columns(command.name, command.summary);
  }
  if (!program.test.empty()) {
    print("\nonly with the launcher ./isoshard\n");
    print_in_columns("test", program.test);
  }
  print("\nexample: {0} {1}\n         {0} COMMAND --help\n\n{2}", program.name, program.example,
        kExitCodes);
}

void print_help(const ProgramWords& program, const Command& command, const OptionTable& table) {
  const std::size_t width = terminal_columns(kLineWidth);
  print("{}\n{}\n{}\nexamples\n{}\n{}", hanging("", command.summary, width),
        hanging("", fmt::format("usage: {} {}", program.name, command.usage), width),
        help_text(table, width), examples_in_columns(command.examples), kExitCodes);
}

// An input that was changed meanwhile explains whatever else was found.
int run_on_stable_inputs(const Command& command, const ParsedOptions& parsed) {
  int code = kExitConforms;
  try {
    code = command.run(parsed);
  } catch (const std::exception&) {
    require_unchanged_inputs();
    throw;
  }
  require_unchanged_inputs();
  return code;
}

// A verdict stands, even if nobody can read it here.
int with_output_told(const ProgramWords& program, int code) {
  try {
    require_printed();
  } catch (const InfrastructureError& error) {
    print_error(fmt::format("{}: {}; the exit code is still that of the result", program.name,
                            error.what()));
  }
  return code;
}

Detail detail_of(const ParsedOptions& parsed) {
  const bool is_quiet = parsed.get<bool>("quiet"), is_verbose = parsed.get<bool>("verbose");
  if (is_quiet && is_verbose) throw UsageError("--quiet and --verbose: give only one of them");
  if (is_quiet) return Detail::kSummary;
  return is_verbose ? Detail::kFull : Detail::kBrief;
}

std::set<std::string, std::less<>> names_of_all_options(std::span<const Command> commands) {
  std::set<std::string, std::less<>> names;
  for (const Command& command : commands) {
    const OptionTable table = options_of(command);
    for (const auto& option : table.options.options()) names.insert(option->long_name());
    for (const auto& [alias, option] : table.aliases) names.insert(alias);
  }
  return names;
}

int run_one(const ProgramWords& program, std::span<const Command> commands, const Command& command,
            const std::vector<std::string>& arguments) {
  OptionTable table = options_of(command);
  table.elsewhere = names_of_all_options(commands);
  table.refuses_unknown_variables = program.refuses_unknown_variables;
  ParsedOptions parsed = parse_options(table, arguments);
  parsed.program = program.name;
  parsed.command = command.name;
  parsed.versions = program.versions;
  parsed.versions[program.name] = ISOSHARD_VERSION;
  if (parsed.get<bool>("help")) {
    print_help(program, command, table);
  } else if (parsed.get<bool>("print-config")) {
    print(render_config(table, parsed));
  } else {
    if (command.judges) set_output_detail(detail_of(parsed));
    const int code = run_on_stable_inputs(command, parsed);
    if (code != kExitConforms || command.judges) return with_output_told(program, code);
  }
  require_printed();
  return kExitConforms;
}

/// "completion SHELL" and "man [COMMAND]": made from the tables of all commands, so not commands
/// themselves.
void print_made(const ProgramWords& program, std::span<const Command> commands,
                const std::vector<std::string>& arguments) {
  const std::string kind = arguments.front();
  const std::string of = arguments.size() > 1 ? arguments[1] : "";
  if (kind == "completion") {
    print(completion_script(program, commands, of));
  } else if (of.empty()) {
    print(man_page(program, commands));
  } else {
    std::vector<std::string> known;
    for (const Command& command : commands) known.push_back(command.name);
    const auto found = std::ranges::find(commands, of, &Command::name);
    if (found == commands.end())
      throw UsageError(fmt::format("man takes the name of a command, got '{}'{}; known are {}", of,
                                   did_you_mean(of, known), join_names(known)));
    print(man_page(program, *found));
  }
  require_printed();
}

}  // namespace

OptionTable options_of(const Command& command) {
  OptionTable table;
  auto add = table.group("general");
  add("help,h", po::bool_switch(), "show this help");
  add("config", po::value<std::string>(), "read options from a JSON file {\"tp\": 2, ...}");
  add("print-config", po::bool_switch(), "show the value and origin of every option, and exit");
  if (command.judges) {
    add("quiet,q", po::bool_switch(), "print the last line only, and no progress");
    add("verbose", po::bool_switch(),
        "print everything: every tensor, tables, what a verdict would have missed");
  }
  command.declare(table);
  return table;
}

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
      require_printed();
      return kExitConforms;
    }
    if (name == "--version" || name == "version") {
      print("{} {}\n", program.name, ISOSHARD_VERSION);
      require_printed();
      return kExitConforms;
    }
    if ((name == "completion" || name == "man") && arguments.size() <= 2) {
      print_made(program, commands, arguments);
      return kExitConforms;
    }
    std::vector<std::string> known;
    for (const auto& command : commands) {
      if (command.name == name)
        return run_one(program, commands, command, {arguments.begin() + 1, arguments.end()});
      known.push_back(command.name);
    }
    if (!program.test.empty()) known.emplace_back("test");  // of the launcher
    if (const auto found = program.elsewhere.find(name); found != program.elsewhere.end())
      throw UsageError(fmt::format("'{}' is {}; '{} --help' lists the commands of this program",
                                   name, found->second, program.name));
    throw UsageError(fmt::format("unknown command '{}'{}; '{} --help' lists the commands", name,
                                 did_you_mean(name, known), program.name));
  } catch (const std::exception& error) {
    print_error(fmt::format("{}: {}", program.name, without_controls(message_of(error))));
    return exit_code_of(error);
  }
}

int run_command_line(std::span<const Command> commands, const std::vector<std::string>& arguments,
                     std::map<std::string, std::string> versions) {
  ProgramWords isoshard{
      "isoshard",
      "isoshard checks whether a parallel training implementation computes what one process "
      "computes.",
      "build everything and run all tests", "verify --preset small"};
  isoshard.versions = std::move(versions);
  isoshard.refuses_unknown_variables = true;
  for (const char* name : {"convert", "judge", "preflight", "repro"})
    isoshard.elsewhere[name] = fmt::format(
        "a command of the Python package; in a clone run ./isoshard {0}, installed python -m "
        "isoshard {0}",
        name);
  return run_command_line(isoshard, commands, arguments);
}

}  // namespace isoshard
