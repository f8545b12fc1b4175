// SPDX-License-Identifier: Apache-2.0
/// Boost.Program_options with suggestions, aliases, environment and JSON file.
#include "harness/cli/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/program_options/environment_iterator.hpp>
#include <boost/program_options/errors.hpp>
#include <boost/program_options/parsers.hpp>
#include <cctype>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "core/base/error.h"
#include "core/base/printable.h"
#include "core/base/suggest.h"
#include "core/io/json.h"

namespace isoshard {
namespace {

namespace po = boost::program_options;

std::vector<std::string> names_of(const OptionTable& table) {
  std::vector<std::string> names;
  for (const auto& option : table.options.options()) names.push_back(option->long_name());
  return names;
}

/// Options and the other names that they have.
std::vector<std::string> accepted_names(const OptionTable& table) {
  std::vector<std::string> names = names_of(table);
  for (const auto& [alias, name] : table.aliases) names.push_back(alias);
  return names;
}

/// --tp_size=2 -> --tp-size=2 -> --tp=2.
std::string normalize_flag(const OptionTable& table, const std::string& argument) {
  if (argument.size() < 3 || !argument.starts_with("--")) return argument;
  const auto equals = argument.find('=');
  std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
  std::replace(name.begin(), name.end(), '_', '-');
  if (const auto alias = table.aliases.find(name); alias != table.aliases.end())
    name = alias->second;
  return "--" + name + (equals == std::string::npos ? "" : argument.substr(equals));
}

/// The parser would read -1 as the largest unsigned number.
void refuse_negative_counts(const OptionTable& table, const po::parsed_options& parsed) {
  for (const auto& option : parsed.options) {
    const po::option_description* description =
        table.options.find_nothrow(option.string_key, false);
    if (description == nullptr) continue;
    if (dynamic_cast<const po::typed_value<std::uint64_t>*>(description->semantic().get()) ==
        nullptr)
      continue;
    for (const std::string& value : option.value) {
      if (value.starts_with('-'))
        throw UsageError(fmt::format("--{} must be at least 0, got {}", option.string_key, value));
    }
  }
}

/// An option that may stand without a value. A switch never has one.
bool has_optional_value(const OptionTable& table, std::string_view flag) {
  if (!flag.starts_with("--")) return false;
  const po::option_description* description =
      table.options.find_nothrow(std::string(flag.substr(2)), false);
  return description != nullptr && description->semantic()->min_tokens() == 0 &&
         description->semantic()->max_tokens() == 1;
}

po::parsed_options parse_command_line(const OptionTable& table,
                                      const std::vector<std::string>& arguments) {
  std::vector<std::string> normalized;
  bool may_be_value = false;       // the parser itself takes such a value only after '='
  bool is_behind_options = false;  // "--": what follows are words of somebody else
  for (const auto& argument : arguments) {
    if (is_behind_options || argument == "--") {
      is_behind_options = true;
      normalized.push_back(argument);
      continue;
    }
    if (may_be_value && !argument.starts_with("--")) {
      normalized.back() += "=" + argument;
      may_be_value = false;
      continue;
    }
    normalized.push_back(normalize_flag(table, argument));
    may_be_value = has_optional_value(table, normalized.back());
  }
  const int style =
      po::command_line_style::allow_long | po::command_line_style::long_allow_adjacent |
      po::command_line_style::long_allow_next | po::command_line_style::allow_short |
      po::command_line_style::allow_dash_for_short | po::command_line_style::short_allow_next;
  // The parser says of an argument too many only that there is one: it gets a place of its own
  // here.
  constexpr const char* kUnexpected = "unexpected argument";
  po::positional_options_description positional = table.positional;
  if (positional.max_total_count() != std::numeric_limits<unsigned>::max())
    positional.add(kUnexpected, -1);
  po::parsed_options parsed = po::command_line_parser(normalized)
                                  .options(table.options)
                                  .positional(positional)
                                  .style(style)
                                  .run();
  for (const auto& option : parsed.options) {
    if (option.string_key == kUnexpected)
      throw UsageError(fmt::format("unexpected argument '{}'; --help shows what the command takes",
                                   printable(option.value.front())));
  }
  return parsed;
}

/// batch-size -> ISOSHARD_BATCH_SIZE.
std::string variable_of(const std::string& option) {
  std::string name = "ISOSHARD_" + option;
  for (char& c : name)
    c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

/// Variables that are no options: of the launcher, the Python package, ranks, tests and tools.
constexpr std::array<std::string_view, 31> kOtherVariables = {
    "ISOSHARD_ATTACHED_TEST",  "ISOSHARD_AUTO",          "ISOSHARD_AXE",
    "ISOSHARD_BROWSER",        "ISOSHARD_BUILD_DIR",     "ISOSHARD_CALIBRATION_CASES",
    "ISOSHARD_CCACHE",         "ISOSHARD_CMAKE_ARGS",    "ISOSHARD_DEBIAN_MIRROR",
    "ISOSHARD_EXPECTED_HOSTS", "ISOSHARD_GOLDEN",        "ISOSHARD_GPU",
    "ISOSHARD_HOSTS_TEST",     "ISOSHARD_JOBS",          "ISOSHARD_JUDGE",
    "ISOSHARD_LAUNCHER",       "ISOSHARD_LISTED_SUITES", "ISOSHARD_MASTER_PORT",
    "ISOSHARD_MASTER_SOCKET",  "ISOSHARD_MUTANT",        "ISOSHARD_MUTANTS_SEEN",
    "ISOSHARD_PROGRAM",        "ISOSHARD_PYTHON",        "ISOSHARD_RANKS",
    "ISOSHARD_REQUIRE_GPU",    "ISOSHARD_RUN_DIR",       "ISOSHARD_RUN_ID",
    "ISOSHARD_SKIP_PACKAGES",  "ISOSHARD_SUDO",          "ISOSHARD_WHOLE_SUITE",
    "ISOSHARD_WORLD_SIZES"};

/// Whether a name may be mistyped for another one. Of two or fewer letters nothing is near.
bool is_near(std::string_view name, std::string_view known) {
  constexpr std::size_t kShort = 3, kLong = 5;
  const std::size_t typos = name.size() >= kLong ? 2 : name.size() >= kShort ? 1 : 0;
  return typos > 0 && edit_distance(name, known) <= typos;
}

/// ISOSHARD_BATCH_SIZE -> batch-size, ISOSHARD_TP_SIZE -> tp; empty for a name that is not an
/// option of this command, but may be set for another one or another part of the project.
std::string option_of_variable(const OptionTable& table, const std::string& variable) {
  constexpr std::string_view kPrefix = "ISOSHARD_";
  if (!variable.starts_with(kPrefix)) return {};
  std::string name = variable.substr(kPrefix.size());
  for (char& c : name)
    c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (const auto alias = table.aliases.find(name); alias != table.aliases.end())
    name = alias->second;
  if (table.options.find_nothrow(name, false) != nullptr) return name;
  if (table.elsewhere.contains(name) ||
      std::ranges::find(kOtherVariables, variable) != kOtherVariables.end())
    return {};
  for (const std::string& known : names_of(table)) {
    if (is_near(name, known))
      throw UsageError(
          fmt::format("{} is set in the environment but is not an option; did you mean {}?",
                      printable(variable), variable_of(known)));
  }
  if (!table.refuses_unknown_variables) return {};
  const std::vector<std::string> others(table.elsewhere.begin(), table.elsewhere.end());
  throw UsageError(
      fmt::format("{} is set in the environment but no command has an option of that name{}; unset "
                  "it",
                  printable(variable), did_you_mean(name, others)));
}

po::parsed_options parse_toml_file(const OptionTable& table, const std::string& path) {
  po::parsed_options parsed(&table.options);
  for (const auto& [name, value] : table.toml_options(path)) {
    po::option option;
    option.string_key = name;
    option.value = {value};
    parsed.options.push_back(option);
  }
  return parsed;
}

po::parsed_options parse_config_file(const OptionTable& table, const std::string& path) {
  if (path.ends_with(".toml") && table.toml_options) return parse_toml_file(table, path);
  const nlohmann::json json = read_json_file(path);
  if (!json.is_object())
    throw FileError(fmt::format("{}: must be an object of option names and values", path));
  po::parsed_options parsed(&table.options);
  const auto names = accepted_names(table);
  for (const auto& [key, value] : json.items()) {
    std::string name = normalize_flag(table, "--" + key).substr(2);
    if (table.options.find_nothrow(name, false) == nullptr)
      throw FileError(
          fmt::format("{}: unknown option '{}'{}", path, key, did_you_mean(name, names)));
    if (name == "config" || name == "print-config" || name == "help")
      throw FileError(fmt::format("{}: '{}' is for the command line only", path, key));
    po::option option;
    option.string_key = name;
    const auto add = [&](const nlohmann::json& item) {
      option.value.push_back(item.is_string() ? item.get<std::string>() : item.dump());
    };
    if (value.is_array()) {
      for (const auto& item : value) add(item);
    } else if (value.is_object() || value.is_null()) {
      throw FileError(
          fmt::format("{}: option '{}' must be a string, number, boolean or list", path, key));
    } else {
      add(value);
    }
    parsed.options.push_back(option);
  }
  return parsed;
}

/// An empty origin stands for the option's own environment variable.
void note_origins(ParsedOptions& result, const std::string& origin) {
  for (const auto& [name, value] : result.values) {
    if (!value.defaulted())
      result.origins.emplace(name, origin.empty() ? variable_of(name) : origin);
  }
}

template <class Store>
void store_environment(const OptionTable& table, Store store) {
  po::parsed_options parsed = po::parse_environment(
      table.options,
      [&](const std::string& variable) { return option_of_variable(table, variable); });
  // set to nothing
  std::erase_if(parsed.options, [](const auto& option) {
    return option.value.empty() || option.value.front().empty();
  });
  try {
    store(parsed, "");
  } catch (const std::exception& error) {
    std::vector<std::string> variables;
    for (const auto& option : parsed.options) variables.push_back(variable_of(option.string_key));
    throw UsageError(fmt::format("{}; it is from the environment, where {} {} set", error.what(),
                                 join_names(variables), variables.size() == 1 ? "is" : "are"));
  }
}

[[noreturn]] void throw_usage(const OptionTable& table, const po::error& error) {
  if (const auto* unknown = dynamic_cast<const po::unknown_option*>(&error)) {
    std::string name = unknown->get_option_name();
    const auto start = name.find_first_not_of('-');
    name = start == std::string::npos ? name : name.substr(start);
    throw UsageError(fmt::format("unknown option '--{}'{}; --help lists the options", name,
                                 did_you_mean(name, accepted_names(table))));
  }
  throw UsageError(fmt::format("{}; --help lists the options", error.what()));
}

constexpr const char* kUngrouped = "options";
constexpr const char* kLastGroup = "general";

const std::string& heading_of(const OptionTable& table, const std::string& option) {
  static const std::string ungrouped = kUngrouped;
  const auto found = table.groups.find(option);
  return found == table.groups.end() ? ungrouped : found->second;
}

std::vector<std::string> headings_of(const OptionTable& table) {
  std::vector<std::string> headings = table.leading_groups;
  for (const auto& option : table.options.options()) {
    const std::string& heading = heading_of(table, option->long_name());
    if (heading != kLastGroup && std::ranges::find(headings, heading) == headings.end())
      headings.push_back(heading);
  }
  headings.emplace_back(kLastGroup);
  return headings;
}

std::vector<std::string> words_of(const boost::program_options::variable_value& value,
                                  std::string text) {
  if (const auto* list = boost::any_cast<std::vector<std::string>>(&value.value())) return *list;
  return {std::move(text)};
}

/// What only says where and how results are shown, or was read already.
bool is_of_this_call(std::string_view name) {
  constexpr std::array<std::string_view, 12> kNames = {
      "help", "config", "print-config", "report",      "output-dir",  "report-dir",
      "dump", "quiet",  "verbose",      "annotations", "failed-from", "findings"};
  return std::ranges::find(kNames, name) != kNames.end();
}

void note_how_to_repeat(const OptionTable& table, ParsedOptions& parsed) {
  std::vector<std::string> last;
  for (const auto& option : table.options.options()) {
    const std::string& name = option->long_name();
    const std::string text = value_text(parsed, name);
    if (text == "-" || name == "help" || name == "print-config") continue;
    parsed.settings[name] = text;
    if (!parsed.given(name) || is_of_this_call(name)) continue;
    const bool is_switch = option->semantic()->max_tokens() == 0;
    if (is_switch && text != "true") continue;
    bool is_positional = false;
    for (unsigned i = 0; i < std::min(table.positional.max_total_count(), 8U); ++i)
      is_positional = is_positional || table.positional.name_for_position(i) == name;
    std::vector<std::string> words = words_of(parsed.values[name], text);
    if (is_positional) {
      last.insert(last.end(), words.begin(), words.end());
    } else if (is_switch) {
      parsed.repeat.push_back("--" + name);
    } else if (words.size() == 1) {
      parsed.repeat.push_back("--" + name + "=" + words.front());
    } else {
      parsed.repeat.push_back("--" + name);
      parsed.repeat.insert(parsed.repeat.end(), words.begin(), words.end());
    }
  }
  // before options that take several values
  parsed.repeat.insert(parsed.repeat.begin(), last.begin(), last.end());
}

}  // namespace

OptionGroup::OptionGroup(OptionTable& table, std::string heading)
    : table_(table), heading_(std::move(heading)) {}

OptionGroup& OptionGroup::operator()(const char* name, const po::value_semantic* value,
                                     const char* description) {
  table_.options.add_options()(name, value, description);
  const std::string names = name;  // "help,h"
  table_.groups[names.substr(0, names.find(','))] = heading_;
  return *this;
}

OptionGroup OptionTable::group(std::string heading) {
  return {*this, std::move(heading)};
}

std::vector<std::pair<std::string, std::vector<boost::shared_ptr<const po::option_description>>>>
options_in_groups(const OptionTable& table) {
  std::vector<std::pair<std::string, std::vector<boost::shared_ptr<const po::option_description>>>>
      groups;
  for (const std::string& heading : headings_of(table)) {
    std::vector<boost::shared_ptr<const po::option_description>> options;
    for (const auto& option : table.options.options())
      if (heading_of(table, option->long_name()) == heading) options.push_back(option);
    if (!options.empty()) groups.emplace_back(heading, std::move(options));
  }
  return groups;
}

std::string help_text(const OptionTable& table, std::size_t width) {
  const auto columns = static_cast<unsigned>(width);
  const unsigned names = std::min(table.options.get_option_column_width(), columns / 2);
  std::string text;
  for (const auto& [heading, options] : options_in_groups(table)) {
    po::options_description group(heading, columns, columns / 2);
    for (const auto& option : options)
      group.add(boost::const_pointer_cast<po::option_description>(option));
    std::ostringstream stream;
    group.print(stream, names);
    text += (text.empty() ? "" : "\n") + stream.str();
  }
  return text;
}

ParsedOptions parse_options(const OptionTable& table, const std::vector<std::string>& arguments) {
  ParsedOptions result;
  result.words = arguments;
  try {
    const auto store = [&](const po::parsed_options& parsed, const std::string& origin) {
      refuse_negative_counts(table, parsed);
      po::store(parsed, result.values);
      note_origins(result, origin);
    };
    store(parse_command_line(table, arguments), "command line");
    store_environment(table, store);
    if (result.values.count("config") != 0 && !result.values["config"].as<std::string>().empty()) {
      const auto path = result.values["config"].as<std::string>();
      const po::parsed_options parsed = parse_config_file(table, path);
      try {
        store(parsed, path);
      } catch (const std::exception& error) {
        throw FileError(fmt::format("{}: {}", path, error.what()));
      }
    }
    po::notify(result.values);
    note_how_to_repeat(table, result);
  } catch (const po::error& error) {
    throw_usage(table, error);
  }
  return result;
}

std::string value_text(const ParsedOptions& parsed, const std::string& name) {
  if (parsed.values.count(name) == 0) return "-";
  const auto& any = parsed.values[name].value();
  if (const auto* s = boost::any_cast<std::string>(&any)) return *s;
  if (const auto* i = boost::any_cast<int>(&any)) return fmt::format("{}", *i);
  if (const auto* l = boost::any_cast<std::int64_t>(&any)) return fmt::format("{}", *l);
  if (const auto* u = boost::any_cast<std::uint64_t>(&any)) return fmt::format("{}", *u);
  if (const auto* d = boost::any_cast<double>(&any)) return fmt::format("{}", *d);
  if (const auto* b = boost::any_cast<bool>(&any)) return *b ? "true" : "false";
  if (const auto* v = boost::any_cast<std::vector<std::string>>(&any))
    return fmt::format("{}", fmt::join(*v, ","));
  return "-";
}

std::string render_config(const OptionTable& table, const ParsedOptions& parsed) {
  std::string text;
  for (const auto& option : table.options.options()) {
    const auto& name = option->long_name();
    if (name == "help" || name == "print-config") continue;
    const auto origin = parsed.origins.find(name);
    text += fmt::format("{:<22} {:<32} {}\n", name, value_text(parsed, name),
                        origin == parsed.origins.end() ? "default" : origin->second);
  }
  return text;
}

}  // namespace isoshard
