// SPDX-License-Identifier: Apache-2.0
/// Checks of blocks and transfers, and their words.
#include "core/comm/blocks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "core/base/error.h"
#include "core/comm/buffers.h"

namespace isoshard {

void check_blocks(const ConstBuffer& blocks, const ConstBuffer& block, int size, const char* op) {
  if (blocks.count != block.count * size || blocks.dtype != block.dtype) {
    throw ShapeError(fmt::format(
        "{} over {} ranks: {} x {} on one side requires {} x {} on the other, got {} x {}", op,
        size, name_of(block.dtype), block.count, name_of(block.dtype), block.count * size,
        name_of(blocks.dtype), blocks.count));
  }
}

void check_counts(std::span<const std::int64_t> counts, int size, const char* op) {
  const bool is_negative =
      std::ranges::any_of(counts, [](std::int64_t count) { return count < 0; });
  if (counts.size() != static_cast<std::size_t>(size) || is_negative) {
    throw ShapeError(fmt::format(
        "{}: there must be one count for each of the {} ranks and none may be negative, got [{}]",
        op, size, fmt::join(counts, ", ")));
  }
}

std::int64_t elements_before(std::span<const std::int64_t> counts, int rank) noexcept {
  std::int64_t begin = 0;
  for (int before = 0; before < rank; ++before) begin += counts[static_cast<std::size_t>(before)];
  return begin;
}

void check_total(const ConstBuffer& buffer, std::span<const std::int64_t> counts, const char* op,
                 const char* name) {
  const std::int64_t total = elements_before(counts, static_cast<int>(counts.size()));
  if (buffer.count != total) {
    throw ShapeError(
        fmt::format("{}: the {} must have {} elements, the sum of the counts [{}], got {}", op,
                    name, total, fmt::join(counts, ", "), buffer.count));
  }
}

void check_same_dtype(const ConstBuffer& input, const ConstBuffer& output, const char* op) {
  if (input.dtype != output.dtype) {
    throw ShapeError(fmt::format("{}: input and output must have the same dtype, got {} and {}", op,
                                 name_of(input.dtype), name_of(output.dtype)));
  }
}

void check_own_block(const ConstBuffer& block, std::span<const std::int64_t> counts, int rank,
                     const char* op, const char* side) {
  const std::int64_t expected = counts[static_cast<std::size_t>(rank)];
  if (block.count != expected) {
    throw ShapeError(fmt::format("{}: the {} of rank {} must have its count of {} elements, got {}",
                                 op, side, rank, expected, block.count));
  }
}

void check_block_to_itself(std::span<const std::int64_t> sent,
                           std::span<const std::int64_t> expected, int rank) {
  const auto own = static_cast<std::size_t>(rank);
  if (sent[own] != expected[own]) {
    throw ShapeError(fmt::format(
        "all_to_all: rank {} must send itself as many elements as it expects, got {} and {}", rank,
        sent[own], expected[own]));
  }
}

void check_data(const ConstBuffer& data, const char* op) {
  check_on_host(data, op, "data");
  check_data_anywhere(data, op);
}

void check_data_anywhere(const ConstBuffer& data, const char* op) {
  if (data.count < 0 || (data.count > 0 && data.data == nullptr)) {
    throw ShapeError(fmt::format(
        "{}: the data must have a count of at least 0 and an address, got {} elements at {}", op,
        data.count, static_cast<const void*>(data.data)));
  }
}

void check_peer(int peer, int size, const char* op) {
  if (peer < 0 || peer >= size)
    throw CommError(fmt::format("{}: the rank of the other side must be from 0 to {}, got {}", op,
                                size - 1, peer));
}

void send_to_itself(std::span<const Transfer> transfers, int rank) {
  for (const auto& [from, to] : pairs_to_itself(transfers, rank))
    copy_bytes(to.data, from.data, bytes_of(from.count, from.dtype));
}

std::vector<std::pair<Buffer, Buffer>> pairs_to_itself(std::span<const Transfer> transfers,
                                                       int rank) {
  std::vector<const Transfer*> sends;
  std::vector<const Transfer*> recvs;
  for (const Transfer& transfer : transfers) {
    if (transfer.peer == rank) (transfer.is_send ? sends : recvs).push_back(&transfer);
  }
  if (sends.size() != recvs.size()) {
    throw CommError(
        fmt::format("send_recv: rank {} must receive from itself as often as it sends to itself, "
                    "got {} sends and {} recvs",
                    rank, sends.size(), recvs.size()));
  }
  std::vector<std::pair<Buffer, Buffer>> pairs;
  for (std::size_t i = 0; i < sends.size(); ++i) {
    const Buffer& from = sends[i]->data;
    const Buffer& to = recvs[i]->data;
    if (from.dtype != to.dtype || from.count != to.count) {
      throw CommError(
          fmt::format("send_recv: what rank {} sends to itself must match what it receives, got {} "
                      "x {} and {} x {}",
                      rank, name_of(from.dtype), from.count, name_of(to.dtype), to.count));
    }
    pairs.emplace_back(from, to);
  }
  return pairs;
}

}  // namespace isoshard
