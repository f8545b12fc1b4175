// SPDX-License-Identifier: Apache-2.0
/// A finding as data: an id, named values, and the sentences made of them.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "harness/ids/said.h"

namespace isoshard {

/// One id for each row of finding_texts.inc. Ids are stable: reports and tests use their names.
enum class FindingId : std::uint8_t {
  kNone,
#define ISOSHARD_FINDING(id, name, text, evidence) id,
#define ISOSHARD_FINDING_PHRASE(id, text)
#include "harness/ids/finding_texts.inc"
#undef ISOSHARD_FINDING
#undef ISOSHARD_FINDING_PHRASE
};

/// Parts of sentences that several findings share, or that some end with.
enum class FindingPhraseId : std::uint8_t {
#define ISOSHARD_FINDING(id, name, text, evidence)
#define ISOSHARD_FINDING_PHRASE(id, text) id,
#include "harness/ids/finding_texts.inc"
#undef ISOSHARD_FINDING
#undef ISOSHARD_FINDING_PHRASE
};

[[nodiscard]] std::span<const IdRow> rows_of(FindingId id) noexcept;
[[nodiscard]] constexpr std::string_view kind_of(FindingId) noexcept {
  return "finding";
}

/// The id and the values that a finding must have.
using ExpectedFinding = ExpectedId<FindingId>;

[[nodiscard]] std::string phrase(FindingPhraseId id, const NamedValues& values = {});

}  // namespace isoshard
