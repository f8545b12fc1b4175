// SPDX-License-Identifier: Apache-2.0
// Option tables as pages and scripts.
#include "harness/cli/man_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "harness/cli/examples.h"

namespace isoshard {
namespace {

/// As text of a page: no line begins with a request, and no character with a meaning stays.
std::string roff(std::string_view text) {
  std::string out;
  bool is_line_start = true;
  for (const char c : text) {
    if (is_line_start && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
    is_line_start = c == '\n';
  }
  return out;
}

std::string header(const std::string& name, const std::string& summary) {
  std::string title = name;
  std::ranges::transform(title, title.begin(), [](char c) {
    return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  });
  return fmt::format(".TH {} 1\n.SH NAME\n{} \\- {}\n", roff(title), roff(name), roff(summary));
}

/// Lines as they stand.
std::string verbatim(std::string_view text) {
  return fmt::format(".nf\n{}\n.fi\n", roff(text));
}

constexpr const char* kCodes =
    ".SH EXIT STATUS\n0 conforms, 1 diverges or vacuous, 2 usage, 3 bad input file, 4 "
    "infrastructure (crash, hang, incomplete), 5 golden missing, stale or refused, 130, 143 and "
    "129 "
    "interrupted.\n";

std::string option_page(const boost::program_options::option_description& option) {
  std::string name = "\\fB\\-\\-" + roff(option.long_name()) + "\\fR";
  const std::string value = option.format_parameter();
  if (!value.empty()) name += " \\fI" + roff(value) + "\\fR";
  return fmt::format(".TP\n{}\n{}\n", name, roff(option.description()));
}

std::vector<std::string> words_of(const Command& command) {
  std::vector<std::string> words;
  const OptionTable table = options_of(command);
  for (const auto& option : table.options.options()) words.push_back("--" + option->long_name());
  std::ranges::sort(words);
  return words;
}

/// In single quotes, for any shell.
std::string in_quotes(std::string_view text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

/// As a name of a shell function.
std::string function_of(std::string name) {
  std::ranges::replace(name, '-', '_');
  return "_" + name;
}

std::string bash_script(const ProgramWords& program, std::span<const Command> commands) {
  std::string names, cases;
  for (const Command& command : commands) {
    names += (names.empty() ? "" : " ") + command.name;
    std::string options;
    for (const std::string& word : words_of(command))
      options += (options.empty() ? "" : " ") + word;
    cases += fmt::format("    {}) words='{}' ;;\n", command.name, options);
  }
  return fmt::format(
      "# bash completion of {0}\n"
      "{1}() {{\n"
      "  local word=${{COMP_WORDS[COMP_CWORD]}} words=''\n"
      "  COMPREPLY=()\n"
      "  if ((COMP_CWORD == 1)); then\n"
      "    mapfile -t COMPREPLY < <(compgen -W '{2} --help --version' -- \"$word\")\n"
      "    return\n"
      "  fi\n"
      "  case ${{COMP_WORDS[1]}} in\n"
      "{3}"
      "  esac\n"
      "  if [[ $word == -* ]]; then\n"
      "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$word\")\n"
      "  else\n"
      "    mapfile -t COMPREPLY < <(compgen -f -- \"$word\")\n"
      "  fi\n"
      "}}\n"
      "complete -o filenames -F {1} {0}\n",
      program.name, function_of(program.name), names, cases);
}

std::string zsh_script(const ProgramWords& program, std::span<const Command> commands) {
  std::string names, cases;
  for (const Command& command : commands) {
    std::string summary = command.summary;
    std::ranges::replace(summary, ':', ';');
    names += fmt::format("    {}\n", in_quotes(command.name + ":" + summary));
    std::string options;
    for (const std::string& word : words_of(command)) options += " " + word;
    cases += fmt::format("    {}) compadd --{} ;;\n", command.name, options);
  }
  return fmt::format(
      "#compdef {0}\n"
      "# zsh completion of {0}\n"
      "{1}() {{\n"
      "  local -a commands\n"
      "  commands=(\n{2}  )\n"
      "  if ((CURRENT == 2)); then\n"
      "    _describe command commands\n"
      "    return\n"
      "  fi\n"
      "  if [[ $words[CURRENT] != -* ]]; then\n"
      "    _files\n"
      "    return\n"
      "  fi\n"
      "  case $words[2] in\n{3}  esac\n"
      "}}\n"
      "{1} \"$@\"\n",
      program.name, function_of(program.name), names, cases);
}

std::string fish_script(const ProgramWords& program, std::span<const Command> commands) {
  std::string script = fmt::format("# fish completion of {}\n", program.name);
  for (const Command& command : commands) {
    script += fmt::format("complete -c {} -n __fish_use_subcommand -a {} -d {}\n", program.name,
                          command.name, in_quotes(command.summary));
    for (const std::string& word : words_of(command))
      script += fmt::format("complete -c {} -n '__fish_seen_subcommand_from {}' -l {}\n",
                            program.name, command.name, word.substr(2));
  }
  return script;
}

}  // namespace

std::string man_page(const ProgramWords& program, std::span<const Command> commands) {
  std::string page =
      header(program.name, program.about) +
      fmt::format(".SH SYNOPSIS\n\\fB{}\\fR \\fICOMMAND\\fR [options]\n", roff(program.name));
  page += ".SH COMMANDS\n";
  std::string group;
  for (const Command& command : commands) {
    if (command.group != group) page += fmt::format(".SS {}\n", roff(group = command.group));
    page += fmt::format(".TP\n\\fB{}\\fR\n{}; see {}\\-{}(1)\n", roff(command.name),
                        roff(command.summary), roff(program.name), roff(command.name));
  }
  page += fmt::format(".SH EXAMPLE\n{}", verbatim(program.name + " " + program.example));
  return page + kCodes +
         ".SH ENVIRONMENT\nEvery option is also a variable: \\-\\-batch\\-size is "
         "ISOSHARD_BATCH_SIZE. The command line comes first, then the environment, then the file "
         "of "
         "\\-\\-config. NO_COLOR takes colors away.\n";
}

std::string man_page(const ProgramWords& program, const Command& command) {
  const OptionTable table = options_of(command);
  std::string page = header(program.name + "-" + command.name, command.summary) +
                     fmt::format(".SH SYNOPSIS\n{}", verbatim(program.name + " " + command.usage));
  page += ".SH OPTIONS\n";
  for (const auto& [heading, options] : options_in_groups(table)) {
    page += fmt::format(".SS {}\n", roff(heading));
    for (const auto& option : options) page += option_page(*option);
  }
  page += fmt::format(".SH EXAMPLES\n{}", verbatim(examples_in_columns(command.examples)));
  return page + kCodes + fmt::format(".SH SEE ALSO\n{}(1)\n", roff(program.name));
}

std::string completion_script(const ProgramWords& program, std::span<const Command> commands,
                              std::string_view shell) {
  if (shell == "bash") return bash_script(program, commands);
  if (shell == "zsh") return zsh_script(program, commands);
  if (shell == "fish") return fish_script(program, commands);
  const std::vector<std::string> known = {"bash", "zsh", "fish"};
  throw UsageError(fmt::format("completion takes the name of a shell, got '{}'{}; known are {}",
                               shell, did_you_mean(std::string(shell), known), join_names(known)));
}

}  // namespace isoshard
