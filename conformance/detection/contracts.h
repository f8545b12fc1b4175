// SPDX-License-Identifier: Apache-2.0
/// The contracts: each claim the suite makes, the tests that prove it and the faults that break it, read from docs/contracts.md,
/// which is compiled in.
#pragma once
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

/// The rows of the table in docs/contracts.md, in its order.
[[nodiscard]] const std::vector<Contract>& contracts();

/// Parses such a table. Errors   FileError for a row that has not four cells or repeats an id.
[[nodiscard]] std::vector<Contract> parse_contracts(std::string_view markdown);

}  // namespace isoshard
