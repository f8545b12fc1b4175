// SPDX-License-Identifier: Apache-2.0
/// What moves in each collective.
///
/// Small all-reduces gather everything on every rank, which adds all for itself. Larger ones go in
/// chunks; a chunk is cut into one slice per rank, which receives the slices of the others, adds
/// them in a kernel and sends the result to all. Where the chunks and slices lie changes no bit
/// (docs/internals/reduction.md).
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/base/error.h"
#include "core/comm/blocks.h"
#include "core/comm/buffers.h"
#include "core/comm/nccl/nccl_communicator.h"
#include "core/comm/reduce.h"

namespace isoshard {
namespace {

/// Up to this size, over all ranks, an all-reduce gathers everything.
constexpr std::size_t kSmallBytes = std::size_t{64} << 10;
/// Of a chunk, over all slices.
constexpr std::size_t kChunkBytes = std::size_t{32} << 20;
constexpr std::int64_t kLineBytes = 256;

std::byte* writable(const std::byte* data) {
  return const_cast<std::byte*>(data);  // NOLINT: a send only reads it
}

std::vector<std::int64_t> repeated(std::int64_t count, int size) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(size), count);
}

std::int64_t round_up(std::int64_t count, std::int64_t unit) {
  return (count + unit - 1) / unit * unit;
}

}  // namespace

Work NcclCommunicator::all_reduce(Buffer data, Reduction reduction, const CallInfo& info) {
  check(data, "all_reduce", "data");
  check_reducible(reduction, data.dtype);
  return world_->guarded([&] {
    NcclLaunch launch = meet(packet_of({.op = CollectiveOp::kAllReduce,
                                        .dtype = data.dtype,
                                        .reduction = reduction,
                                        .count = data.count}),
                             info);
    launch.follow(data);
    if (size() > 1 && data.count > 0) {
      std::byte* const place = launch.output(data, /*has_input=*/true);
      if (is_native(data.dtype)) {
        launch.at_once([&] {
          launch.api().native_all_reduce(place, data.count, data.dtype, reduction, launch.comm(),
                                         launch.stream());
        });
      } else if (bytes_of(data.count, data.dtype) * static_cast<std::size_t>(size()) <=
                 kSmallBytes) {
        reduce_small(launch, place, data, reduction);
      } else {
        reduce_in_slices(launch, place, data, reduction);
      }
    }
    return launch.end();
  });
}

void NcclCommunicator::reduce_small(NcclLaunch& launch, std::byte* data, const Buffer& buffer,
                                    Reduction reduction) const {
  const std::size_t bytes = bytes_of(buffer.count, buffer.dtype);
  std::byte* const gathered = launch.scratch(bytes * static_cast<std::size_t>(size()));
  launch.at_once(
      [&] { launch.api().all_gather(data, gathered, bytes, launch.comm(), launch.stream()); });
  launch.reduce({.order = own_order(),
                 .reduction = reduction,
                 .dtype = buffer.dtype,
                 .gathered = gathered,
                 .stride_bytes = bytes,
                 .num_sources = size(),
                 .chunk = ring_chunk_size(buffer.count, size()),
                 .output = data,
                 .count = buffer.count});
}

void NcclCommunicator::reduce_in_slices(NcclLaunch& launch, std::byte* data, const Buffer& buffer,
                                        Reduction reduction) const {
  const auto element_bytes = static_cast<std::int64_t>(size_of(buffer.dtype));
  const std::int64_t line = kLineBytes / element_bytes;
  const std::int64_t most =
      std::min(buffer.count, static_cast<std::int64_t>(kChunkBytes) / element_bytes);
  const std::int64_t stride = round_up(ring_chunk_size(most, size()), line);
  std::byte* const gathered = launch.scratch(bytes_of(stride * size(), buffer.dtype));
  for (std::int64_t begin = 0; begin < buffer.count; begin += stride * size()) {
    const std::int64_t count = std::min(stride * size(), buffer.count - begin);
    // slices are of equal size but for the last ones, which may be empty
    const auto begin_of = [&](int rank) { return std::min(count, stride * rank); };
    const auto place_of = [&](int rank) {
      return data + bytes_of(begin + begin_of(rank), buffer.dtype);
    };
    const auto bytes_of_slice = [&](int rank) {
      return bytes_of(begin_of(rank + 1) - begin_of(rank), buffer.dtype);
    };
    const auto gathered_of = [&](int rank) {
      return gathered + bytes_of(stride * rank, buffer.dtype);
    };
    std::vector<NcclPiece> receives, sends, results, own;
    for (int step = 1; step < size(); ++step) {
      const int to = next(step), from = next(size() - step);
      sends.push_back({to, place_of(to), bytes_of_slice(to)});
      receives.push_back({from, gathered_of(from), bytes_of_slice(rank())});
      own.push_back({to, place_of(rank()), bytes_of_slice(rank())});
      results.push_back({from, place_of(from), bytes_of_slice(from)});
    }
    launch.exchange(receives, sends);
    launch.copy(gathered_of(rank()), place_of(rank()), bytes_of_slice(rank()));
    launch.reduce({.order = own_order(),
                   .reduction = reduction,
                   .dtype = buffer.dtype,
                   .gathered = gathered,
                   .stride_bytes = bytes_of(stride, buffer.dtype),
                   .num_sources = size(),
                   .begin = begin + begin_of(rank()),
                   .chunk = ring_chunk_size(buffer.count, size()),
                   .output = place_of(rank()),
                   .count = begin_of(rank() + 1) - begin_of(rank())});
    launch.exchange(results, own);
  }
}

Work NcclCommunicator::all_gather(ConstBuffer input, Buffer output, const CallInfo& info) {
  check(input, "all_gather", "input");
  check(output, "all_gather", "output");
  check_blocks(output, input, size(), "all_gather");
  return world_->guarded([&] {
    NcclLaunch launch = meet(
        packet_of({.op = CollectiveOp::kAllGather, .dtype = input.dtype, .count = input.count}),
        info);
    const std::size_t bytes = bytes_of(input.count, input.dtype);
    if (bytes != 0) {
      const std::byte* const from = launch.input(input);
      std::byte* const to = launch.output(output, /*has_input=*/false);
      if (size() == 1) {
        launch.copy(to, from, bytes);
      } else {
        launch.at_once(
            [&] { launch.api().all_gather(from, to, bytes, launch.comm(), launch.stream()); });
      }
    }
    return launch.end();
  });
}

Work NcclCommunicator::all_gather_uneven(ConstBuffer input, Buffer output, Counts counts,
                                         const CallInfo& info) {
  check(input, "all_gather_uneven", "input");
  check(output, "all_gather_uneven", "output");
  check_same_dtype(input, output, "all_gather_uneven");
  check_counts(counts, size(), "all_gather_uneven");
  check_total(output, counts, "all_gather_uneven", "output");
  check_own_block(input, counts, rank(), "all_gather_uneven", "input");
  return world_->guarded([&] {
    NcclLaunch launch = meet(
        packet_of(
            {.op = CollectiveOp::kAllGatherUneven, .dtype = input.dtype, .count = output.count},
            counts),
        info);
    const std::byte* const from = launch.input(input);
    gather_blocks(launch, from, launch.output(output, /*has_input=*/false), input.dtype, counts);
    return launch.end();
  });
}

void NcclCommunicator::gather_blocks(NcclLaunch& launch, const std::byte* input, std::byte* output,
                                     Dtype dtype, Counts counts) const {
  const auto bytes = [&](int rank) {
    return bytes_of(counts[static_cast<std::size_t>(rank)], dtype);
  };
  const auto place = [&](int rank) {
    return output + bytes_of(elements_before(counts, rank), dtype);
  };
  std::vector<NcclPiece> receives, sends;
  for (int step = 1; step < size(); ++step) {
    const int to = next(step), from = next(size() - step);
    sends.push_back({to, writable(input), bytes(rank())});
    receives.push_back({from, place(from), bytes(from)});
  }
  if (size() > 1) launch.exchange(receives, sends);
  launch.copy(place(rank()), input, bytes(rank()));
}

Work NcclCommunicator::reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                                      const CallInfo& info) {
  check(input, "reduce_scatter", "input");
  check(output, "reduce_scatter", "output");
  check_blocks(input, output, size(), "reduce_scatter");
  check_reducible(reduction, output.dtype);
  return world_->guarded([&] {
    NcclLaunch launch = meet(packet_of({.op = CollectiveOp::kReduceScatter,
                                        .dtype = output.dtype,
                                        .reduction = reduction,
                                        .count = output.count}),
                             info);
    const std::byte* const from = launch.input(input);
    std::byte* const to = launch.output(output, /*has_input=*/false);
    if (size() > 1 && is_native(output.dtype) && output.count > 0) {
      launch.at_once([&] {
        launch.api().native_reduce_scatter(from, to, output.count, output.dtype, reduction,
                                           launch.comm(), launch.stream());
      });
    } else {
      reduce_blocks(launch, from, to, output.dtype, repeated(output.count, size()), reduction);
    }
    return launch.end();
  });
}

Work NcclCommunicator::reduce_scatter_uneven(ConstBuffer input, Buffer output, Counts counts,
                                             Reduction reduction, const CallInfo& info) {
  check(input, "reduce_scatter_uneven", "input");
  check(output, "reduce_scatter_uneven", "output");
  check_same_dtype(input, output, "reduce_scatter_uneven");
  check_reducible(reduction, output.dtype);
  check_counts(counts, size(), "reduce_scatter_uneven");
  check_total(input, counts, "reduce_scatter_uneven", "input");
  check_own_block(output, counts, rank(), "reduce_scatter_uneven", "output");
  return world_->guarded([&] {
    NcclLaunch launch = meet(packet_of({.op = CollectiveOp::kReduceScatterUneven,
                                        .dtype = output.dtype,
                                        .reduction = reduction,
                                        .count = input.count},
                                       counts),
                             info);
    const std::byte* const from = launch.input(input);
    std::byte* const to = launch.output(output, /*has_input=*/false);
    if (size() > 1 && is_native(output.dtype)) {
      reduce_blocks_natively(launch, from, to, output.dtype, counts, reduction);
    } else {
      reduce_blocks(launch, from, to, output.dtype, counts, reduction);
    }
    return launch.end();
  });
}

void NcclCommunicator::reduce_blocks_natively(NcclLaunch& launch, const std::byte* input,
                                              std::byte* output, Dtype dtype, Counts counts,
                                              Reduction reduction) const {
  for (int root = 0; root < size(); ++root) {
    const std::int64_t count = counts[static_cast<std::size_t>(root)];
    if (count == 0) continue;
    launch.at_once([&] {
      launch.api().native_reduce(input + bytes_of(elements_before(counts, root), dtype), output,
                                 count, dtype, reduction, root, launch.comm(), launch.stream());
    });
  }
}

// In rounds of a chunk over all ranks, so that what others send fits into the scratch.
void NcclCommunicator::reduce_blocks(NcclLaunch& launch, const std::byte* input, std::byte* output,
                                     Dtype dtype, Counts counts, Reduction reduction) const {
  const auto block_of = [&](int rank) {
    return writable(input) + bytes_of(elements_before(counts, rank), dtype);
  };
  if (size() == 1) return launch.copy(output, input, bytes_of(counts[0], dtype));
  const std::size_t slot = kChunkBytes / static_cast<std::size_t>(size()) / kLineBytes * kLineBytes;
  const std::size_t largest = bytes_of(*std::ranges::max_element(counts), dtype);
  const std::size_t stride = std::min(slot, largest);
  std::byte* const gathered = launch.scratch(stride * static_cast<std::size_t>(size()));
  const auto gathered_of = [&](int rank) {
    return gathered + stride * static_cast<std::size_t>(rank);
  };
  for (std::size_t begin = 0; begin < largest; begin += slot) {
    const auto piece = [&](int rank) {
      const std::size_t total = bytes_of(counts[static_cast<std::size_t>(rank)], dtype);
      return begin < total ? std::min(slot, total - begin) : 0;
    };
    std::vector<NcclPiece> receives, sends;
    for (int step = 1; step < size(); ++step) {
      const int to = next(step), from = next(size() - step);
      sends.push_back({to, block_of(to) + begin, piece(to)});
      receives.push_back({from, gathered_of(from), piece(rank())});
    }
    launch.exchange(receives, sends);
    const std::size_t bytes = piece(rank());
    if (bytes == 0) continue;
    launch.copy(gathered_of(rank()), block_of(rank()) + begin, bytes);
    launch.reduce({.order = own_order(),
                   .reduction = reduction,
                   .dtype = dtype,
                   .gathered = gathered,
                   .stride_bytes = stride,
                   .num_sources = size(),
                   .last_rank = rank(),
                   .output = output + begin,
                   .count = static_cast<std::int64_t>(bytes / size_of(dtype))});
  }
}

Work NcclCommunicator::all_to_all(ConstBuffer input, Counts input_counts, Buffer output,
                                  Counts output_counts, const CallInfo& info) {
  check(input, "all_to_all", "input");
  check(output, "all_to_all", "output");
  check_same_dtype(input, output, "all_to_all");
  check_counts(input_counts, size(), "all_to_all");
  check_counts(output_counts, size(), "all_to_all");
  check_total(input, input_counts, "all_to_all", "input");
  check_total(output, output_counts, "all_to_all", "output");
  check_block_to_itself(input_counts, output_counts, rank());
  return world_->guarded([&] {
    NcclLaunch launch =
        meet(packet_of({.op = CollectiveOp::kAllToAll, .dtype = input.dtype, .count = input.count},
                       input_counts, output_counts),
             info);
    const std::byte* const from = launch.input(input);
    std::byte* const to = launch.output(output, /*has_input=*/false);
    const auto piece_of = [&](int rank, const std::byte* data, Counts counts) {
      return NcclPiece{rank, writable(data + bytes_of(elements_before(counts, rank), input.dtype)),
                       bytes_of(counts[static_cast<std::size_t>(rank)], input.dtype)};
    };
    std::vector<NcclPiece> receives, sends;
    for (int step = 1; step < size(); ++step) {
      sends.push_back(piece_of(next(step), from, input_counts));
      receives.push_back(piece_of(next(size() - step), to, output_counts));
    }
    if (size() > 1) launch.exchange(receives, sends);
    const NcclPiece own = piece_of(rank(), from, input_counts);
    launch.copy(piece_of(rank(), to, output_counts).data, own.data, own.bytes);
    return launch.end();
  });
}

Work NcclCommunicator::broadcast(Buffer data, int root, const CallInfo& info) {
  check(data, "broadcast", "data");
  if (root < 0 || root >= size())
    throw CommError(
        fmt::format("broadcast: the root must be from 0 to {}, got {}", size() - 1, root));
  return world_->guarded([&] {
    NcclLaunch launch = meet(packet_of({.op = CollectiveOp::kBroadcast,
                                        .dtype = data.dtype,
                                        .root = root,
                                        .count = data.count}),
                             info);
    const std::size_t bytes = bytes_of(data.count, data.dtype);
    launch.follow(data);
    if (size() > 1 && bytes != 0) {
      std::byte* const place = launch.output(data, /*has_input=*/rank() == root);
      launch.at_once(
          [&] { launch.api().broadcast(place, bytes, root, launch.comm(), launch.stream()); });
    }
    return launch.end();
  });
}

}  // namespace isoshard
