// SPDX-License-Identifier: Apache-2.0
/// The checks of calls that move one block per rank, which every backend makes before anything
/// moves.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/comm/communicator.h"

namespace isoshard {

/// `blocks` holds one block of the other's size for each rank.
/// Errors   ShapeError.
void check_blocks(const ConstBuffer& blocks, const ConstBuffer& block, int size, const char* op);

/// There is one count for each of `size` ranks, and none is negative.
/// Errors   ShapeError.
void check_counts(std::span<const std::int64_t> counts, int size, const char* op);

/// Elements before the block of `rank`.
[[nodiscard]] std::int64_t elements_before(std::span<const std::int64_t> counts, int rank) noexcept;

/// The buffer holds all blocks.
/// Errors   ShapeError.
void check_total(const ConstBuffer& buffer, std::span<const std::int64_t> counts, const char* op,
                 const char* name);

/// Errors   ShapeError.
void check_same_dtype(const ConstBuffer& input, const ConstBuffer& output, const char* op);

/// The block of a rank itself has its count. `side` is input or output.
/// Errors   ShapeError.
void check_own_block(const ConstBuffer& block, std::span<const std::int64_t> counts, int rank,
                     const char* op, const char* side);

/// What a rank sends to itself is what it expects.
/// Errors   ShapeError.
void check_block_to_itself(std::span<const std::int64_t> sent,
                           std::span<const std::int64_t> expected, int rank);

/// Data of a send or recv. `op` is what the error calls it.
/// Errors   UsageError, ShapeError.
void check_data(const ConstBuffer& data, const char* op);
/// The same for data that may be anywhere.
/// Errors   ShapeError.
void check_data_anywhere(const ConstBuffer& data, const char* op);

/// Errors   CommError for a peer outside the group.
void check_peer(int peer, int size, const char* op);

/// Copies what a grouped call sends from a rank to itself.
/// Errors   CommError if sends and recvs do not pair up.
void send_to_itself(std::span<const Transfer> transfers, int rank);
/// What send_to_itself copies, from the first to the second, for data that may be anywhere.
/// Errors   as send_to_itself.
[[nodiscard]] std::vector<std::pair<Buffer, Buffer>> pairs_to_itself(
    std::span<const Transfer> transfers, int rank);

}  // namespace isoshard
