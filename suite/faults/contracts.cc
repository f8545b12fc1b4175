// SPDX-License-Identifier: Apache-2.0
/// Parses the contracts table and the derivations that the build copied out of docs/.
#include "suite/faults/contracts.h"

#include <fmt/format.h>

#include <algorithm>
#include <regex>
#include <span>
#include <sstream>

#include "core/base/error.h"
#include "suite/faults/fault.h"

namespace isoshard {
namespace {

constexpr std::string_view kContractsPage =
#include "contracts_page.inc"
    ;

constexpr std::string_view kDerivationsPage =
#include "derivations_page.inc"
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
    if (cells.size() != 4)
      throw FileError(fmt::format(
          "docs/reference/contracts.md: a row must have 4 cells, got {}: {}", cells.size(), line));
    if (std::any_of(result.begin(), result.end(),
                    [&](const Contract& c) { return c.id == cells[0]; }))
      throw FileError(
          fmt::format("docs/reference/contracts.md: duplicate contract '{}'", cells[0]));
    result.push_back({cells[0], cells[1], cells[2], cells[3]});
  }
  return result;
}

ContractNames names_in(const std::string& cell) {
  static const std::regex kSeparator(R"(; |, (?=[A-Z]\w*\.\w|[a-z]\w*_))");
  static const std::regex kName(R"([A-Z]\w*\.\w+|\w+)");
  const auto has = [](std::span<const Fault> list, const std::string& id) {
    return std::ranges::find(list, id, &Fault::id) != list.end();
  };
  const auto add = [](std::vector<std::string>& names, const std::string& name) {
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  };
  ContractNames result;
  for (std::sregex_token_iterator part(cell.begin(), cell.end(), kSeparator, -1), end; part != end;
       ++part) {
    const std::string text = *part;
    bool is_name = false;
    for (std::sregex_iterator match(text.begin(), text.end(), kName), none; match != none;
         ++match) {
      const std::string name = match->str();
      std::vector<std::string>* const names = name.find('.') != std::string::npos ? &result.tests
                                              : has(fault_catalogue(), name)      ? &result.faults
                                              : has(benign_variations(), name)    ? &result.benign
                                                                                  : nullptr;
      if (names != nullptr) add(*names, name);
      is_name = is_name || (names != nullptr && name == text);
    }
    if (!is_name) result.notes.push_back(text);
  }
  return result;
}

const std::vector<Contract>& contracts() {
  static const std::vector<Contract> table = parse_contracts(kContractsPage);
  return table;
}

std::map<std::string, std::string, std::less<>> parse_derivations(std::string_view markdown) {
  std::map<std::string, std::string, std::less<>> sections;
  std::istringstream lines{std::string(markdown)};
  std::string* section = nullptr;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("## ")) {
      section = &sections[line.substr(3)];
    } else if (section != nullptr && (!line.empty() || !section->empty())) {
      *section += line + "\n";
    }
  }
  for (auto& [heading, text] : sections) text.erase(text.find_last_not_of('\n') + 1);
  return sections;
}

std::string derivation_of(std::string_view contract_id) {
  static const auto sections = parse_derivations(kDerivationsPage);
  for (std::string_view id = contract_id; !id.empty();) {
    if (const auto found = sections.find(id); found != sections.end()) return found->second;
    const auto dot = id.rfind('.');
    id = dot == std::string_view::npos ? std::string_view() : id.substr(0, dot);
  }
  return "";
}

}  // namespace isoshard
