// SPDX-License-Identifier: Apache-2.0
/// The contracts: each claim of the suite, the tests that prove it and the faults that break it,
/// read from docs/reference/contracts.md and docs/reference/derivations.md, which are compiled in.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace isoshard {

struct Contract {
  std::string id;  ///< tp.column.forward
  std::string claim;
  std::string tests;   ///< "Suite.Case, Suite.Case", or "planned"
  std::string faults;  ///< ids of faults, or the negative controls that show the tests can fail
};

/// What a cell of the table says, taken apart. A note is a remark of several words, such as "the
/// same test takes one partial away: Suite.Case"; the names in it are listed, too.
struct ContractNames {
  std::vector<std::string> tests;   ///< "Suite.Case"
  std::vector<std::string> faults;  ///< ids of the catalog
  std::vector<std::string> benign;  ///< ids of benign variations
  std::vector<std::string> notes;
};
[[nodiscard]] ContractNames names_in(const std::string& cell);

/// The rows of the table in docs/reference/contracts.md, in its order.
[[nodiscard]] const std::vector<Contract>& contracts();

/// The reason why the claim must hold: the section of docs/reference/derivations.md (compiled in)
/// with the longest heading that the id begins with. Empty if there is none.
[[nodiscard]] std::string derivation_of(std::string_view contract_id);

/// The sections of such a page, by heading ("## tp.row").
[[nodiscard]] std::map<std::string, std::string, std::less<>> parse_derivations(
    std::string_view markdown);

/// Parses such a table. Errors   FileError for a row that does not have four cells or that repeats
/// an id.
[[nodiscard]] std::vector<Contract> parse_contracts(std::string_view markdown);

}  // namespace isoshard
