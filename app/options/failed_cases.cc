// SPDX-License-Identifier: Apache-2.0
// From a stored report to options.
#include "app/options/failed_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "core/io/json.h"
#include "harness/report/formats/earlier_reports.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr JsonLimits kLimits{.max_bytes = std::size_t{256} << 20,
                             .max_values = std::size_t{1} << 24};

bool is_failed(const json& item) {
  return item.value("status", "") != "conforms" || !item.value("unmet", json()).is_null();
}

std::string name_of_option(const std::string& word) {
  return word.substr(0, word.find('='));
}

}  // namespace

FailedCases failed_cases_of(const fs::path& input) {
  const fs::path file = stored_report(input);
  const json report = read_json_file(file, kLimits);
  FailedCases failed;
  try {
    const json& command = report.at("provenance").at("command");
    if (command.size() < 2 || command[1] != "verify")
      throw FileError(fmt::format("{}: must be a report of verify, got one of {}", file.string(),
                                  command.dump()));
    for (std::size_t i = 2; i < command.size(); ++i)
      failed.words.push_back(command[i].get<std::string>());
    if (std::ranges::find(failed.words, "--fail-fast") != failed.words.end())
      throw UsageError(fmt::format(
          "{}: must be a report of all cases, got one of a run with --fail-fast, which left out "
          "those after the first failure; run it again without --fail-fast",
          file.string()));
    for (const json& item : report.at("cases"))
      if (is_failed(item)) failed.cases.push_back(item.at("case").get<std::string>());
  } catch (const json::exception& error) {
    throw FileError(
        fmt::format("{}: does not say how its cases ran ({}); run them again with the "
                    "options that made it",
                    file.string(), error.what()));
  }
  if (failed.cases.empty())
    throw UsageError(fmt::format("nothing selected: every case of {} conforms", file.string()));
  return failed;
}

std::vector<std::string> merged_options(const std::vector<std::string>& given,
                                        const std::vector<std::string>& earlier) {
  std::set<std::string> names;
  for (const std::string& word : given)
    if (word.starts_with("--")) names.insert(name_of_option(word));
  std::vector<std::string> merged = given;
  bool is_dropped = false;
  for (const std::string& word : earlier) {
    if (word.starts_with("--")) is_dropped = names.contains(name_of_option(word));
    if (!is_dropped) merged.push_back(word);
  }
  return merged;
}

ParsedOptions with_options_of(const FailedCases& failed, const OptionTable& table,
                              const ParsedOptions& given) {
  ParsedOptions options = parse_options(table, merged_options(given.words, failed.words));
  options.program = given.program;
  options.command = given.command;
  options.versions = given.versions;
  return options;
}

}  // namespace isoshard
