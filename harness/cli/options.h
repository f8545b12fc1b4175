// SPDX-License-Identifier: Apache-2.0
/// Options of a command: from the command line, the environment (ISOSHARD_*) and a JSON file, in
/// this order of precedence.
#pragma once
#include <boost/program_options/options_description.hpp>
#include <boost/program_options/positional_options.hpp>
#include <boost/program_options/variables_map.hpp>
#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace isoshard {

class OptionGroup;

/// The options that a command accepts. `aliases` maps other systems' flag names to ours (tp-size ->
/// tp). --help shows the options in their groups.
///
///     auto add = table.group("output");
///     add("output-dir", po::value<std::string>(), "write report.json to this folder");
struct OptionTable {
  boost::program_options::options_description options{"options"};
  boost::program_options::positional_options_description positional;
  std::map<std::string, std::string, std::less<>> aliases;
  /// Option -> heading. Options that are in no group are listed under "options".
  std::map<std::string, std::string, std::less<>> groups;
  /// Headings that --help shows before all others, in this order. The others follow in the order in
  /// which their options were declared.
  std::vector<std::string> leading_groups;
  /// Reads a --config file that ends in .toml: options and their values. Empty: the command takes
  /// JSON alone.   Errors   FileError.
  std::function<std::vector<std::pair<std::string, std::string>>(const std::string& path)>
      toml_options;

  /// Options of the program's other commands: their variables may be set, too.
  std::set<std::string, std::less<>> elsewhere;
  /// Whether every ISOSHARD_* variable must be an option of the program, or one that another part
  /// of the project reads. Else only those are refused whose name is nearly that of an option.
  bool refuses_unknown_variables = false;

  /// Adds options under a heading. A group may be asked for several times.
  [[nodiscard]] OptionGroup group(std::string heading);
};

/// Declares options as boost's add_options() does: name, value, description.
/// Requires   the table outlives the group.
class OptionGroup {
 public:
  OptionGroup(OptionTable& table, std::string heading);
  OptionGroup& operator()(const char* name, const boost::program_options::value_semantic* value,
                          const char* description);

 private:
  OptionTable& table_;
  std::string heading_;
};

/// The options of --help, a heading before each group, names and texts in columns of equal width.
/// The group "general" comes last.
[[nodiscard]] std::string help_text(const OptionTable& table, std::size_t width = 80);

/// The options under each heading, in the order of --help.
[[nodiscard]] std::vector<std::pair<
    std::string, std::vector<boost::shared_ptr<const boost::program_options::option_description>>>>
options_in_groups(const OptionTable& table);

struct ParsedOptions {
  boost::program_options::variables_map values;
  /// Option -> "command line", "ISOSHARD_TP", "FILE", "default"
  std::map<std::string, std::string, std::less<>> origins;
  /// Who was asked: "isoshard", "verify"; and of what versions it is made.
  std::string program, command;
  std::map<std::string, std::string> versions;
  std::vector<std::string> words;  ///< of the command line, as they came
  /// The options that were given, wherever, as a command line that gives them all.
  std::vector<std::string> repeat;
  /// Every option that has a value.
  std::map<std::string, std::string> settings;

  [[nodiscard]] bool given(const std::string& name) const {
    return values.count(name) != 0 && !values[name].defaulted();
  }
  template <class T>
  [[nodiscard]] const T& get(const std::string& name) const {
    return values[name].template as<T>();
  }
};

/// Parses `arguments` (without program and command names). `_` in a flag name is taken as `-`.
/// Abbreviations are refused.
/// Errors   UsageError: unknown flag (with a suggestion), missing or malformed value, a flag given
///          twice, an ISOSHARD_* variable that is no option (OptionTable). FileError: the --config
///          file is not a flat JSON object of known options.
[[nodiscard]] ParsedOptions parse_options(const OptionTable& table,
                                          const std::vector<std::string>& arguments);

/// The value of an option as it may be given on the command line; "-" if it has none.
[[nodiscard]] std::string value_text(const ParsedOptions& parsed, const std::string& name);

/// One line for each option: name, value, origin.
[[nodiscard]] std::string render_config(const OptionTable& table, const ParsedOptions& parsed);

}  // namespace isoshard
