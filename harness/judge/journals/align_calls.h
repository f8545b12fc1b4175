// SPDX-License-Identifier: Apache-2.0
/// Which calls one rank makes and another does not.
#pragma once
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "harness/bundle/journal.h"

namespace isoshard {

using CallList = std::vector<const JournaledCall*>;

/// "all_reduce (sum) of 4096 bytes in fp32": what ranks of a group must have in common. The bytes
/// are left out where ranks may rightly give different numbers of them.
[[nodiscard]] std::string common_words(const JournaledCall& call);

/// The same with all bytes, and where it was: "... (gradient of w, backward, train.py:31)".
[[nodiscard]] std::string words_of(const JournaledCall& call);

/// A call that is missing (expected alone), one more (actual alone), or another one (both), by
/// their places from 0 on.
struct CallDifference {
  std::optional<std::size_t> expected, actual;
};

/// The fewest differences between two lists, in order; none if they agree in common_words. Of
/// several ways to align equal calls the one counts whose tensors, phases and lines fit best. Lists
/// that are too long for it have one difference, the first.
[[nodiscard]] std::vector<CallDifference> differences(const CallList& expected,
                                                      const CallList& actual);

}  // namespace isoshard
