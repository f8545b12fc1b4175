// SPDX-License-Identifier: Apache-2.0
/// How much of a run masks and noise leave to judge, and when it is too little.
#pragma once
#include <span>
#include <string>

#include "harness/verdict/verdict.h"

namespace isoshard {

/// Over all tensors of a verdict.
[[nodiscard]] JudgedShare judged_share_of(std::span<const TensorComparison> tensors);

/// The least share of stepped parameters that must be judged in the step where most is, and the
/// largest share of gradients that may be insensitive (docs/internals/tolerances.md has why, and
/// what clean cases show).
[[nodiscard]] double least_judged_share(Dtype coarsest) noexcept;
[[nodiscard]] double most_insensitive_gradients() noexcept;

/// Why a run shows too little; none if it shows enough.
[[nodiscard]] Rule too_little_judged(std::span<const TensorComparison> tensors, Dtype coarsest);

/// "98.2 % of elements judged, least 41 % in parameter after step w (step 0)"; empty where nothing
/// is masked.
[[nodiscard]] std::string judged_words(const JudgedShare& judged);

}  // namespace isoshard
