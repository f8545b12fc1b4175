// SPDX-License-Identifier: Apache-2.0
/// Which records a run must have: those of the reference on every rank that holds some of them, and
/// those that it may leave out, where it records the like of them.
#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/ids/rule.h"
#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"
#include "harness/verdict/parts/held.h"

namespace isoshard::detail {

/// Records of one sort, counted.
struct Counted {
  std::int64_t number = 0;
  std::string first;

  void add(const RecordKey& key);
  /// "2 gradients between micro-batches were not recorded, first gradient of w (step 0)".
  [[nodiscard]] std::string words(std::string_view noun, std::string_view which,
                                  std::string_view verb) const;
};

/// "3 of 4 ranks are there; missing or doubled: 2"; empty if each rank of the mesh is there once.
[[nodiscard]] Rule missing_ranks(const Trace& run);

/// The ranks that do not have a record which the others have, and that hold some of it by its
/// layout.
[[nodiscard]] std::vector<int> absent_ranks(const Trace& run, const std::vector<Held>& held);

/// Who has something of the module that the tensor is of: they lack it.
[[nodiscard]] std::vector<int> ranks_near(const Trace& run, const RecordKey& key);

/// Records that a run need not have: hyperparameters, which are compared where both sides have
/// them; gradients between micro-batches and after clipping, and summands. A run that has some of
/// the latter must have the like of them, since what it left out it has computed, too. The like of
/// a summand, and of a gradient between micro-batches, is that of the same name in another layer,
/// step or call: what a run cannot add up yet there it cannot add up here. The like of a clipped
/// gradient is that of any parameter.
class OptionalRecords {
 public:
  OptionalRecords(const Reference& reference, const Trace& run, const JudgePolicy& policy);

  /// Whether a run that does not have the reference's record `key` at all may do so.
  [[nodiscard]] bool may_be_left_out(const RecordKey& key) const;
  /// Whether a run may have the record `key`, of which the reference has none: hyperparameters.
  [[nodiscard]] bool may_be_added(const RecordKey& key) const;
  /// What the run lacks though it has the like, and the reference has what it is compared with.
  [[nodiscard]] std::vector<RecordKey> missing() const;
  /// Whether the run has gradients between micro-batches, of other parameters than of those that it
  /// left out.
  [[nodiscard]] bool has_between_micro_batches() const { return has_micro_batches_; }

 private:
  [[nodiscard]] bool has_like(const RecordKey& key) const;

  const Reference& reference_;
  const JudgePolicy& policy_;
  std::set<RecordKey> recorded_;
  std::set<std::pair<RecordKind, std::string>> likes_;  ///< names without their layers' numbers
  bool has_clipped_ = false, has_micro_batches_ = false;
};

}  // namespace isoshard::detail
