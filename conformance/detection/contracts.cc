// SPDX-License-Identifier: Apache-2.0
/// Parses the contracts table that the build copied out of docs/contracts.md.
#include "conformance/detection/contracts.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "base/error.h"

namespace isoshard {
namespace {

constexpr std::string_view kContractsPage =
#include "contracts_page.inc"
    ;

std::string trim(std::string_view text) {
  const auto begin = text.find_first_not_of(" `");
  const auto end = text.find_last_not_of(" `");
  std::string result(begin == std::string_view::npos ? "" : text.substr(begin, end - begin + 1));
  result.erase(std::remove(result.begin(), result.end(), '`'), result.end());
  return result;
}

std::vector<std::string> cells_of(std::string_view row) {
  std::vector<std::string> cells;
  row.remove_prefix(1);
  while (!row.empty()) {
    const auto end = row.find('|');
    if (end == std::string_view::npos) break;
    cells.push_back(trim(row.substr(0, end)));
    row.remove_prefix(end + 1);
  }
  return cells;
}

}  // namespace

std::vector<Contract> parse_contracts(std::string_view markdown) {
  std::vector<Contract> result;
  std::istringstream lines{std::string(markdown)};
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with('|') || line.starts_with("| id |") || line.starts_with("|---")) continue;
    const auto cells = cells_of(line);
    if (cells.size() != 4) throw FileError(fmt::format("docs/contracts.md: a row has {} cells instead of 4: {}", cells.size(), line));
    if (std::any_of(result.begin(), result.end(), [&](const Contract& c) { return c.id == cells[0]; }))
      throw FileError(fmt::format("docs/contracts.md: contract '{}' stands twice", cells[0]));
    result.push_back({cells[0], cells[1], cells[2], cells[3]});
  }
  return result;
}

const std::vector<Contract>& contracts() {
  static const std::vector<Contract> table = parse_contracts(kContractsPage);
  return table;
}

}  // namespace isoshard
