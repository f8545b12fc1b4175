// SPDX-License-Identifier: Apache-2.0
/// Calls that move one block per rank, of equal or uneven sizes: all_gather, reduce_scatter,
/// all_to_all.
///
/// Blocks go through the windows in rounds of at most a buffer per rank, each with one meeting, as
/// region_collectives.cc explains. The number of rounds follows from the largest block, so that all
/// ranks make as many.
#include <algorithm>
#include <cstring>

#include "core/comm/blocks.h"
#include "core/comm/buffers.h"
#include "core/comm/reduce.h"
#include "core/comm/region/region_communicator.h"

namespace isoshard {
namespace {

constexpr std::size_t kLineBytes = 64;

Counts repeated(std::int64_t count) {
  Counts counts;
  counts.fill(count);
  return counts;
}

Counts checked_counts(std::span<const std::int64_t> given, int size, const char* op) {
  check_counts(given, size, op);
  Counts counts{};
  std::ranges::copy(given, counts.begin());
  return counts;
}

/// Of a block of `count` elements, in bytes: what one round moves that starts at byte `begin` of
/// every block.
std::size_t piece_of(std::int64_t count, Dtype dtype, std::size_t begin, std::size_t most_bytes) {
  const std::size_t total = bytes_of(count, dtype);
  return begin < total ? std::min(most_bytes, total - begin) : 0;
}

std::size_t largest_of(const Counts& counts, int size, Dtype dtype) {
  return bytes_of(*std::max_element(counts.begin(), counts.begin() + size), dtype);
}

}  // namespace

Work RegionCommunicator::all_gather(ConstBuffer input, Buffer output, const CallInfo& info) {
  check_buffer(input, "all_gather", "input");
  check_buffer(output, "all_gather", "output");
  check_blocks(output, input, size_, "all_gather");
  Call call =
      enter({.op = CollectiveOp::kAllGather, .dtype = input.dtype, .count = input.count}, info);
  gather_blocks(call, input, output, repeated(input.count));
  leave(call);
  return {};
}

Work RegionCommunicator::all_gather_uneven(ConstBuffer input, Buffer output,
                                           std::span<const std::int64_t> given,
                                           const CallInfo& info) {
  check_buffer(input, "all_gather_uneven", "input");
  check_buffer(output, "all_gather_uneven", "output");
  check_same_dtype(input, output, "all_gather_uneven");
  const Counts counts = checked_counts(given, size_, "all_gather_uneven");
  check_total(output, given, "all_gather_uneven", "output");
  check_own_block(input, given, rank_, "all_gather_uneven", "input");
  Call call = enter(
      {.op = CollectiveOp::kAllGatherUneven, .dtype = input.dtype, .count = output.count}, info);
  if (group_ != nullptr) announcement_of(rank_, call.call).counts = counts;
  gather_blocks(call, input, output, counts);
  leave(call);
  return {};
}

void RegionCommunicator::gather_blocks(Call& call, ConstBuffer input, Buffer output,
                                       const Counts& counts) {
  const auto block_of = [&](int rank) {
    return output.data + bytes_of(elements_before(counts, rank), output.dtype);
  };
  copy_bytes(block_of(rank_), input.data, bytes_of(input.count, input.dtype));
  if (group_ == nullptr) return;
  const std::size_t largest = largest_of(counts, size_, output.dtype);
  std::size_t begin = 0;
  do {
    const auto piece = [&](int rank) {
      return piece_of(counts[static_cast<std::size_t>(rank)], output.dtype, begin, kBufferBytes);
    };
    const std::uint64_t chunk = num_chunks_++;
    copy_bytes(own_buffer(chunk, piece(rank_)), block_of(rank_) + begin, piece(rank_));
    meet_others(call);
    for (int step = 1; step < size_; ++step) {
      const int from = (rank_ + step) % size_;
      copy_bytes(block_of(from) + begin, buffer(from, chunk), piece(from));
    }
    begin += kBufferBytes;
  } while (begin < largest);
}

Work RegionCommunicator::reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                                        const CallInfo& info) {
  check_buffer(input, "reduce_scatter", "input");
  check_buffer(output, "reduce_scatter", "output");
  check_blocks(input, output, size_, "reduce_scatter");
  check_reducible(reduction, output.dtype);
  Call call = enter({.op = CollectiveOp::kReduceScatter,
                     .dtype = output.dtype,
                     .reduction = reduction,
                     .count = output.count},
                    info);
  reduce_blocks(call, input, output, repeated(output.count));
  leave(call);
  return {};
}

Work RegionCommunicator::reduce_scatter_uneven(ConstBuffer input, Buffer output,
                                               std::span<const std::int64_t> given,
                                               Reduction reduction, const CallInfo& info) {
  check_buffer(input, "reduce_scatter_uneven", "input");
  check_buffer(output, "reduce_scatter_uneven", "output");
  check_same_dtype(input, output, "reduce_scatter_uneven");
  check_reducible(reduction, output.dtype);
  const Counts counts = checked_counts(given, size_, "reduce_scatter_uneven");
  check_total(input, given, "reduce_scatter_uneven", "input");
  check_own_block(output, given, rank_, "reduce_scatter_uneven", "output");
  Call call = enter({.op = CollectiveOp::kReduceScatterUneven,
                     .dtype = output.dtype,
                     .reduction = reduction,
                     .count = input.count},
                    info);
  if (group_ != nullptr) announcement_of(rank_, call.call).counts = counts;
  reduce_blocks(call, input, output, counts);
  leave(call);
  return {};
}

void RegionCommunicator::reduce_blocks(Call& call, ConstBuffer input, Buffer output,
                                       const Counts& counts) {
  const auto block_of = [&](int rank) {
    return input.data + bytes_of(elements_before(counts, rank), input.dtype);
  };
  if (group_ == nullptr) {
    copy_bytes(output.data, input.data, bytes_of(output.count, output.dtype));
    return;
  }
  const auto size = static_cast<std::size_t>(size_);
  const std::size_t largest = largest_of(counts, size_, output.dtype);
  const std::size_t slot = std::min(kBufferBytes / size / kLineBytes * kLineBytes, largest);
  std::size_t begin = 0;
  do {
    const auto piece = [&](int rank) {
      return piece_of(counts[static_cast<std::size_t>(rank)], output.dtype, begin, slot);
    };
    const std::uint64_t chunk = num_chunks_++;
    std::byte* const own = own_buffer(chunk, slot * size);
    for (int to = 0; to < size_; ++to) {
      if (to != rank_)
        copy_bytes(own + slot * static_cast<std::size_t>(to), block_of(to) + begin, piece(to));
    }
    meet_others(call);
    std::array<const std::byte*, kMaxRegionRanks> sources{};
    for (int from = 0; from < size_; ++from) {
      sources[static_cast<std::size_t>(from)] =
          from == rank_ ? block_of(rank_) + begin
                        : buffer(from, chunk) + slot * static_cast<std::size_t>(rank_);
    }
    if (const std::size_t bytes = piece(rank_); bytes != 0) {
      reduce_block_of_rank(reduction_order(), call.call.reduction, output.dtype,
                           {sources.data(), size}, rank_, output.data + begin,
                           static_cast<std::int64_t>(bytes / size_of(output.dtype)));
    }
    begin += slot;
  } while (begin < largest);
}

Work RegionCommunicator::all_to_all(ConstBuffer input, std::span<const std::int64_t> input_counts,
                                    Buffer output, std::span<const std::int64_t> output_counts,
                                    const CallInfo& info) {
  check_buffer(input, "all_to_all", "input");
  check_buffer(output, "all_to_all", "output");
  check_same_dtype(input, output, "all_to_all");
  const Dtype dtype = input.dtype;
  const Counts counts = checked_counts(input_counts, size_, "all_to_all");
  const Counts from_counts = checked_counts(output_counts, size_, "all_to_all");
  check_total(input, input_counts, "all_to_all", "input");
  check_total(output, output_counts, "all_to_all", "output");
  const auto own_rank = static_cast<std::size_t>(rank_);
  check_block_to_itself(input_counts, output_counts, rank_);
  const auto input_of = [&](int rank) {
    return input.data + bytes_of(elements_before(counts, rank), dtype);
  };
  const auto output_of = [&](int rank) {
    return output.data + bytes_of(elements_before(from_counts, rank), dtype);
  };
  Call call = enter({.op = CollectiveOp::kAllToAll, .dtype = dtype, .count = input.count}, info);
  copy_bytes(output_of(rank_), input_of(rank_), bytes_of(counts[own_rank], dtype));
  if (group_ != nullptr) {
    announcement_of(rank_, call.call).counts = counts;
    announcement_of(rank_, call.call).output_counts = from_counts;
    const std::size_t most_bytes =
        kBufferBytes / static_cast<std::size_t>(size_) / kLineBytes * kLineBytes;
    std::size_t largest = 0;  // of all ranks' blocks: known from the first meeting on
    std::size_t begin = 0;
    do {
      // A rank's pieces of a round lie one after the other. Its counts tell a reader where, and
      // come with the first meeting.
      const auto piece = [&](const Counts& of, int to) {
        return piece_of(of[static_cast<std::size_t>(to)], dtype, begin, most_bytes);
      };
      const auto offset = [&](const Counts& of, int to) {
        std::size_t bytes = 0;
        for (int before = 0; before < to; ++before) bytes += piece(of, before);
        return bytes;
      };
      const std::uint64_t chunk = num_chunks_++;
      std::byte* const own = own_buffer(chunk, offset(counts, size_));
      for (int to = 0; to < size_; ++to) {
        if (to != rank_)
          copy_bytes(own + offset(counts, to), input_of(to) + begin, piece(counts, to));
      }
      meet_others(call);
      for (int step = 1; step < size_; ++step) {
        const int from = (rank_ + step) % size_;
        const Counts& theirs = announcement_of(from, call.call).counts;
        copy_bytes(output_of(from) + begin, buffer(from, chunk) + offset(theirs, rank_),
                   piece(theirs, rank_));
      }
      for (int from = 0; from < size_; ++from) {
        largest =
            std::max(largest, largest_of(announcement_of(from, call.call).counts, size_, dtype));
      }
      begin += most_bytes;
    } while (begin < largest);
  }
  leave(call);
  return {};
}

}  // namespace isoshard
