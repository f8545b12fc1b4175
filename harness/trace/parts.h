// SPDX-License-Identifier: Apache-2.0
/// The parts of a local tensor (boxes or flat ranges): walking, packing and comparing them run by
/// run.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "harness/trace/record.h"

namespace isoshard {

class Comparer;

/// How many elements the part holds; `flat` as the record's layout says.
[[nodiscard]] std::int64_t numel_of(const PartStats& part, bool flat) noexcept;

/// Whether the rank holds anything of the tensor: a shard may be empty.
[[nodiscard]] bool has_elements(const Record& record) noexcept;

/// The record's parts without statistics, as its layout cuts rank `rank` of `mesh`.
///
/// Errors   MeshError, with the record's name, if the local tensor is not what the layout says or a
///          part lies outside it.
[[nodiscard]] std::vector<PartStats> parts_of(const Record& record, const MeshShape& mesh,
                                              int rank);

/// The part's elements of the contiguous local tensor in row-major order. Returns `local` itself,
/// moved on, if they lie in one run; otherwise they are copied into `scratch`.
[[nodiscard]] const std::byte* packed(const Record& record, const PartStats& part,
                                      const std::byte* local, std::vector<std::byte>& scratch);

/// Digest of a packed part, by which parts are equal (PartStats::digest): that of its bytes, with
/// one bit pattern for every NaN. What sign and payload a NaN has, IEEE 754 leaves open, and
/// kernels give what they like. Memory that nobody has written (core/memory/unwritten.h) is no NaN
/// here: its bits count.
[[nodiscard]] std::uint64_t digest_of_part(const std::byte* packed_part, Dtype dtype,
                                           std::int64_t numel);

/// Calls visit(global, packed, count) for each run of `count` elements of a packed part that is one
/// in the global tensor, too, in order.
void for_each_run(
    const PartStats& part, const Record& record,
    const std::function<void(std::int64_t global, std::int64_t packed, std::int64_t count)>& visit);

/// Compares a packed part with the whole reference tensor. `selected`, if not null, has one byte
/// per element of the global tensor. Fills `part.stats` anew; global indices. `comparer`, if not
/// null, takes the place of accumulate().
void compare_part(PartStats& part, const Record& record, const std::byte* packed_part,
                  const std::byte* reference, Dtype reference_dtype, double reference_grad_scale,
                  const std::uint8_t* selected, Comparer* comparer = nullptr);

/// Copies packed part elements to their places in a contiguous global tensor of the same dtype.
void place_part(const PartStats& part, const Record& record, const std::byte* packed_part,
                std::byte* global);

/// The record's local tensor, cut out of a contiguous global tensor of its dtype: of its parts, and
/// zeros where it has none. In one run of `global` it is that memory itself, and else in `scratch`.
/// Requires   `record.parts` are parts_of() it.
[[nodiscard]] const std::byte* local_of(const Record& record, const std::byte* global,
                                        std::vector<std::byte>& scratch);

}  // namespace isoshard
