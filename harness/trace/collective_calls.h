// SPDX-License-Identifier: Apache-2.0
/// The collectives that a rank called in a step, as a record, and the table that they must follow.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/comm/collective.h"
#include "harness/trace/record.h"

namespace isoshard {

/// One call that a rank must make.
struct ExpectedCall {
  CollectiveCall call;  ///< op, purpose, axis, dtype, reduction and count are compared
  /// Not made in a step that is skipped because gradients were not finite
  bool only_if_stepped = false;
  /// `call.count` may be spread over several calls in a row that are alike but for it
  bool may_be_split = false;
  /// It may come anywhere among the calls in a row that have this. Not together with may_be_split.
  bool any_order = false;
};

/// What `rank` must call in `step` on its groups along `axis`, in order. Groups of one call nothing
/// that counts.
using CollectiveTable = std::function<std::vector<ExpectedCall>(int rank, int step, Axis axis)>;

/// The name of the record of a rank's calls in a step on its groups along one axis: a scalar, int64
/// [calls, 6].
[[nodiscard]] std::string collectives_name(Axis axis, int rank);
/// The axis of such a record.
[[nodiscard]] Axis axis_of_collectives(const RecordKey& key);

/// One row a call: op, purpose, axis, dtype and reduction as the numbers of their enumerators, then
/// the count of elements.
[[nodiscard]] std::vector<std::int64_t> rows_of(std::span<const CollectiveCall> calls);
/// Errors   ShapeError for bytes that are no rows, or for a number that no enumerator has.
[[nodiscard]] std::vector<CollectiveCall> calls_of(std::span<const std::byte> rows);

/// "all_reduce (grad_reduce, dp, avg) of 4096 bytes in fp32".
[[nodiscard]] std::string describe(const CollectiveCall& call);

/// Where calls leave their table.
struct CallMismatch {
  std::size_t index = 0;  ///< of the first call that is another one, counted from 0
  std::size_t calls = 0;  ///< how many were made, the wrong one among them
  std::string must, got;  ///< the calls in words, or what stands in their place
};
/// `is_skipped`: the step changed no parameter.
[[nodiscard]] std::optional<CallMismatch> first_mismatch(std::span<const ExpectedCall> expected,
                                                         std::span<const CollectiveCall> actual,
                                                         bool is_skipped);

}  // namespace isoshard
