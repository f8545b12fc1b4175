// SPDX-License-Identifier: Apache-2.0
/// Every text of the tables with example values: what texts_golden.txt pins.
#pragma once
#include <string>

namespace isoshard {

/// One block for each id or phrase, in the order of the tables. A value is 2 where a placeholder is
/// counted, 1.5 where it has the format of a real number, else its name in angle brackets.
[[nodiscard]] std::string rendered_texts();

}  // namespace isoshard
