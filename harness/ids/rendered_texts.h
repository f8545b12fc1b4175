// SPDX-License-Identifier: Apache-2.0
/// Every text of the tables with example values: what texts_golden.txt pins.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "harness/ids/named_values.h"

namespace isoshard {

struct NamedText {
  std::string_view kind, name;  ///< "cause", "scale"
  std::string_view text;
  bool is_more = false;  ///< the evidence of a finding, the reason for a rule
};

/// In the order of the tables.
[[nodiscard]] std::vector<NamedText> all_texts();

/// A value for each placeholder: 2 where it is counted, 1.5 where it has the format of a real
/// number, else its name in angle brackets.
[[nodiscard]] NamedValues examples_of(std::string_view text);

/// One block for each id.
[[nodiscard]] std::string rendered_texts();

/// A page of docs/ on the findings, causes and rules of a table: "cause" makes
/// docs/reference/causes.md.
[[nodiscard]] std::string rendered_page(std::string_view kind);

}  // namespace isoshard
