// SPDX-License-Identifier: Apache-2.0
// The table of findings.
#include "harness/ids/finding.h"

namespace isoshard {
namespace {

constexpr IdRow kFindings[] = {
    {"", ""},
#define ISOSHARD_FINDING(id, name, text, evidence) {name, text, evidence},
#define ISOSHARD_FINDING_PHRASE(id, text)
#include "harness/ids/finding_texts.inc"
#undef ISOSHARD_FINDING
#undef ISOSHARD_FINDING_PHRASE
};

constexpr std::string_view kFindingPhrases[] = {
#define ISOSHARD_FINDING(id, name, text, evidence)
#define ISOSHARD_FINDING_PHRASE(id, text) text,
#include "harness/ids/finding_texts.inc"
#undef ISOSHARD_FINDING
#undef ISOSHARD_FINDING_PHRASE
};

}  // namespace

std::span<const IdRow> rows_of(FindingId) noexcept {
  return kFindings;
}

std::string phrase(FindingPhraseId id, const NamedValues& values) {
  return filled(kFindingPhrases[static_cast<std::size_t>(id)], values);
}

}  // namespace isoshard
