// SPDX-License-Identifier: Apache-2.0
/// The likely cause of a divergence as data: an id, named values, and the sentence made of them.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "harness/ids/said.h"

namespace isoshard {

/// One id for each row of cause_texts.inc. Ids are stable: reports, tests and the fault catalog use
/// their names.
enum class CauseId : std::uint16_t {
  kNone,
#define ISOSHARD_CAUSE(id, name, text) id,
#define ISOSHARD_PHRASE(id, text)
#include "harness/ids/cause_texts.inc"
#undef ISOSHARD_CAUSE
#undef ISOSHARD_PHRASE
};

/// Parts of sentences that several causes share, or that some causes end with.
enum class PhraseId : std::uint16_t {
#define ISOSHARD_CAUSE(id, name, text)
#define ISOSHARD_PHRASE(id, text) id,
#include "harness/ids/cause_texts.inc"
#undef ISOSHARD_CAUSE
#undef ISOSHARD_PHRASE
};

[[nodiscard]] std::span<const IdRow> rows_of(CauseId id) noexcept;
[[nodiscard]] constexpr std::string_view kind_of(CauseId) noexcept {
  return "cause";
}

/// What a pattern found. Without an id it found nothing.
using Cause = Said<CauseId>;
/// The id and the values that a cause must have.
using ExpectedCause = ExpectedId<CauseId>;

[[nodiscard]] inline Cause make_cause(CauseId id, NamedValues values = {}) {
  return said(id, std::move(values));
}
[[nodiscard]] std::string phrase(PhraseId id, const NamedValues& values = {});

}  // namespace isoshard
