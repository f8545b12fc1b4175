// SPDX-License-Identifier: Apache-2.0
/// Judging one checkpoint against another: the same comparator, causes and verdict as between runs.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "harness/verdict/verdict.h"

namespace isoshard {

class Comparer;

/// The name of a tensor of the second checkpoint, and what it is called in the first. Both may hold
/// one *, which stands for the same text.
struct Renaming {
  std::string from, to;
};

/// What whoever compares says of two checkpoints.
struct CheckpointRules {
  /// Allowed relative Frobenius error and scale error of each tensor. None: every value must be
  /// equal.
  std::optional<double> rtol = {};
  /// Tensors that one of the two need not have, as KIND/NAME patterns (matches_any); kinds are
  /// param and optimizer.
  std::vector<std::string> not_recorded = {};
  /// The first that fits counts.
  std::vector<Renaming> renamings = {};
  /// Whether tensors of two floating dtypes are compared after the finer one is rounded to the
  /// coarser one. Else another dtype is a finding.
  bool rounds_to_coarser = false;
};

/// Judges every tensor of `actual` against the one of its name in `reference`.
///
/// Of tied embeddings a checkpoint may hold either one. If config.json of one of the two says that
/// they are tied, the one that is there stands for the other, with its values; a note lists it.
/// `comparer`, if not null, takes the place of accumulate().
///
/// Guarantees   conforms only if every tensor of either one was compared or is named in
///              `not_recorded`. Signed zeros are equal; a note says how many tensors differ in them
///              alone. A conforming verdict is exact only if nothing was rounded.
/// Errors       as open_checkpoint; UsageError if both are the same file or folder, or if a
/// renaming
///              gives two tensors one name.
[[nodiscard]] Verdict compare_checkpoints(const std::filesystem::path& reference,
                                          const std::filesystem::path& actual,
                                          const CheckpointRules& rules = {},
                                          Comparer* comparer = nullptr);

/// "FROM=TO,FROM=TO" as renamings.
/// Errors   UsageError for a part without =, with an empty side, or with a * on one side only.
[[nodiscard]] std::vector<Renaming> parse_renamings(const std::string& text);

}  // namespace isoshard
