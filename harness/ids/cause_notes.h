// SPDX-License-Identifier: Apache-2.0
/// What each cause means, what it needs to be found, and what looks like it and is not: the data of
/// docs/reference/causes.md and of `isoshard explain`.
#pragma once
#include <span>
#include <string_view>

#include "harness/ids/cause.h"

namespace isoshard {

struct CauseNote {
  CauseId id;
  std::string_view meaning;          ///< a sentence
  std::string_view needs;            ///< what must be recorded, and what must hold
  std::string_view looks_like = {};  ///< for what it is not given; may be empty
};

[[nodiscard]] const CauseNote& note_of(CauseId id) noexcept;

struct ClaimNote {
  Claim claim;
  std::string_view name, meaning;  ///< "same bytes", a sentence
};

/// In the order of the claims.
[[nodiscard]] std::span<const ClaimNote> claim_notes() noexcept;

}  // namespace isoshard
