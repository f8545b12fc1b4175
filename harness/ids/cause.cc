// SPDX-License-Identifier: Apache-2.0
// The table of causes.
#include "harness/ids/cause.h"

namespace isoshard {
namespace {

constexpr IdRow kCauses[] = {
    {"", ""},
#define ISOSHARD_CAUSE(id, name, text) {name, text},
#define ISOSHARD_PHRASE(id, text)
#include "harness/ids/cause_texts.inc"
#undef ISOSHARD_CAUSE
#undef ISOSHARD_PHRASE
};

constexpr std::string_view kPhrases[] = {
#define ISOSHARD_CAUSE(id, name, text)
#define ISOSHARD_PHRASE(id, text) text,
#include "harness/ids/cause_texts.inc"
#undef ISOSHARD_CAUSE
#undef ISOSHARD_PHRASE
};

}  // namespace

std::span<const IdRow> rows_of(CauseId) noexcept {
  return kCauses;
}

std::string phrase(PhraseId id, const NamedValues& values) {
  return filled(kPhrases[static_cast<std::size_t>(id)], values);
}

}  // namespace isoshard
