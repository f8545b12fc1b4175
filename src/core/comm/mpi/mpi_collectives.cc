// SPDX-License-Identifier: Apache-2.0
/// How data move between pairs of ranks.
///
/// Small all-reduces travel with the announcement: every rank adds all for itself. Larger ones go
/// in chunks; a chunk is cut into one slice per rank, which receives the slices of the others, adds
/// them and sends the result to all. The inputs of the next chunk are under way together with the
/// results of this one. Where the chunks and slices lie changes no bit
/// (docs/internals/reduction.md).
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/base/error.h"
#include "core/comm/blocks.h"
#include "core/comm/buffers.h"
#include "core/comm/mpi/mpi_communicator.h"
#include "core/comm/mpi/mpi_native.h"
#include "core/comm/reduce.h"

namespace isoshard {
namespace {

/// Up to this size an all-reduce travels with its announcement.
constexpr std::size_t kSmallBytes = 2048;
/// Of a chunk, over all slices.
constexpr std::size_t kChunkBytes = std::size_t{2} << 20;
constexpr std::int64_t kLineBytes = 64;

using Sources = std::vector<const std::byte*>;  ///< by group rank

std::byte* writable(const std::byte* data) {
  return const_cast<std::byte*>(data);  // NOLINT: a send only reads it
}

std::vector<std::int64_t> repeated(std::int64_t count, int size) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(size), count);
}

void make_room(std::vector<std::byte>& scratch, std::size_t bytes) {
  if (scratch.size() < bytes) scratch.resize(bytes);
}

}  // namespace

/// One chunk of an all-reduce. Counts are in elements.
struct MpiCommunicator::Slices {
  std::byte* data = nullptr;     ///< this rank's tensor, from the chunk's first element
  std::byte* scratch = nullptr;  ///< the others' slices for this rank, one stride each
  std::int64_t offset = 0;       ///< of the first element in the tensor
  std::int64_t count = 0;
  std::int64_t slice = 0;  ///< elements of a full slice
  Dtype dtype = Dtype::kFloat32;

  [[nodiscard]] std::int64_t begin(int rank) const { return std::min(count, slice * rank); }
  [[nodiscard]] std::int64_t size(int rank) const { return begin(rank + 1) - begin(rank); }
  [[nodiscard]] std::byte* of_tensor(int rank) const { return data + bytes_of(begin(rank), dtype); }
  [[nodiscard]] std::byte* of_scratch(int rank) const {
    return scratch + bytes_of(slice * rank, dtype);
  }
  [[nodiscard]] std::size_t bytes(int rank) const { return bytes_of(size(rank), dtype); }
};

Work MpiCommunicator::all_reduce(Buffer data, Reduction reduction, const CallInfo& info) {
  check_buffer(data, "all_reduce", "data");
  check_reducible(reduction, data.dtype);
  Packet own = packet_of({.op = CollectiveOp::kAllReduce,
                          .dtype = data.dtype,
                          .reduction = reduction,
                          .count = data.count});
  const bool is_native = reduction_order() == ReductionOrder::kNative;
  const std::size_t bytes = bytes_of(data.count, data.dtype);
  const bool is_small = bytes <= kSmallBytes && !is_native;
  if (is_small && size_ > 1) own.data.assign(data.data, data.data + bytes);
  const MetCall call = calls_.meet(std::move(own), info);
  if (size_ > 1) {
    if (is_native) {
      native_all_reduce(native_, data, reduction, waiter());
    } else if (is_small) {
      reduce_small(call, data);
    } else {
      reduce_in_slices(call, data);
    }
  }
  calls_.leave(call);
  return {};
}

std::function<void(MPI_Request&)> MpiCommunicator::waiter() const {
  return [this](MPI_Request& request) {
    Requests requests = {request};
    world_->endpoint.wait_until([&] { return MpiEndpoint::are_done(requests); },
                                /*moves_data=*/true);
  };
}

void MpiCommunicator::reduce_small(const MetCall& call, Buffer data) {
  Sources sources(static_cast<std::size_t>(size_));
  for (int from = 0; from < size_; ++from)
    sources[static_cast<std::size_t>(from)] =
        call.packets[static_cast<std::size_t>(from)].data.data();
  reduce_part(reduction_order(), call.call.reduction, data.dtype, sources, {0, data.count},
              data.data, data.count);
}

void MpiCommunicator::reduce_in_slices(const MetCall& call, Buffer data) {
  const auto element_bytes = static_cast<std::int64_t>(size_of(data.dtype));
  const std::int64_t line = kLineBytes / element_bytes * size_;
  const auto whole_lines = [&](std::int64_t count) { return (count + line - 1) / line * line; };
  const std::int64_t most =
      std::max(static_cast<std::int64_t>(kChunkBytes) / element_bytes / line * line, line);
  const std::int64_t stride = std::min(most, whole_lines(data.count));
  const std::size_t half = bytes_of(stride, data.dtype);
  make_room(world_->scratch, 2 * half);
  const auto chunk_at = [&](std::int64_t begin) {
    const std::int64_t count = std::min(stride, data.count - begin);
    return Slices{.data = data.data + begin * element_bytes,
                  .scratch = world_->scratch.data() + (begin / stride % 2 == 0 ? 0 : half),
                  .offset = begin,
                  .count = count,
                  .slice = whole_lines(count) / size_,
                  .dtype = data.dtype};
  };
  std::vector<Piece> receives, sends;
  const auto move_inputs = [&](const Slices& chunk) {
    for (int step = 1; step < size_; ++step) {
      const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
      sends.push_back({world_rank_of(to), chunk.of_tensor(to), chunk.bytes(to)});
      receives.push_back({world_rank_of(from), chunk.of_scratch(from), chunk.bytes(rank_)});
    }
  };
  const auto move_results = [&](const Slices& chunk) {
    for (int step = 1; step < size_; ++step) {
      const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
      sends.push_back({world_rank_of(to), chunk.of_tensor(rank_), chunk.bytes(rank_)});
      receives.push_back({world_rank_of(from), chunk.of_tensor(from), chunk.bytes(from)});
    }
  };
  const auto move = [&] {
    exchange(receives, sends);
    receives.clear();
    sends.clear();
  };
  move_inputs(chunk_at(0));
  move();
  for (std::int64_t begin = 0; begin < data.count; begin += stride) {
    const Slices chunk = chunk_at(begin);
    add_own_slice(chunk, call.call);
    move_results(chunk);
    if (begin + stride < data.count) move_inputs(chunk_at(begin + stride));
    move();
  }
}

void MpiCommunicator::add_own_slice(const Slices& slices, const CollectiveCall& call) {
  Sources sources(static_cast<std::size_t>(size_));
  for (int from = 0; from < size_; ++from) {
    sources[static_cast<std::size_t>(from)] =
        from == rank_ ? slices.of_tensor(rank_) : slices.of_scratch(from);
  }
  reduce_part(reduction_order(), call.reduction, slices.dtype, sources,
              {slices.offset + slices.begin(rank_), call.count}, slices.of_tensor(rank_),
              slices.size(rank_));
}

Work MpiCommunicator::all_gather(ConstBuffer input, Buffer output, const CallInfo& info) {
  check_buffer(input, "all_gather", "input");
  check_buffer(output, "all_gather", "output");
  check_blocks(output, input, size_, "all_gather");
  const MetCall call = calls_.meet(
      packet_of({.op = CollectiveOp::kAllGather, .dtype = input.dtype, .count = input.count}),
      info);
  gather_blocks(input, output, repeated(input.count, size_));
  calls_.leave(call);
  return {};
}

Work MpiCommunicator::all_gather_uneven(ConstBuffer input, Buffer output, Counts counts,
                                        const CallInfo& info) {
  check_buffer(input, "all_gather_uneven", "input");
  check_buffer(output, "all_gather_uneven", "output");
  check_same_dtype(input, output, "all_gather_uneven");
  check_counts(counts, size_, "all_gather_uneven");
  check_total(output, counts, "all_gather_uneven", "output");
  check_own_block(input, counts, rank_, "all_gather_uneven", "input");
  const MetCall call = calls_.meet(
      packet_of({.op = CollectiveOp::kAllGatherUneven, .dtype = input.dtype, .count = output.count},
                counts),
      info);
  gather_blocks(input, output, counts);
  calls_.leave(call);
  return {};
}

void MpiCommunicator::gather_blocks(ConstBuffer input, Buffer output, Counts counts) {
  const auto piece_of = [&](int rank, int peer) {
    return Piece{world_rank_of(peer),
                 output.data + bytes_of(elements_before(counts, rank), output.dtype),
                 bytes_of(counts[static_cast<std::size_t>(rank)], output.dtype)};
  };
  copy_bytes(piece_of(rank_, rank_).data, input.data, bytes_of(input.count, input.dtype));
  std::vector<Piece> receives, sends;
  for (int step = 1; step < size_; ++step) {
    const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
    sends.push_back(piece_of(rank_, to));
    receives.push_back(piece_of(from, from));
  }
  exchange(receives, sends);
}

Work MpiCommunicator::reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                                     const CallInfo& info) {
  check_buffer(input, "reduce_scatter", "input");
  check_buffer(output, "reduce_scatter", "output");
  check_blocks(input, output, size_, "reduce_scatter");
  check_reducible(reduction, output.dtype);
  const MetCall call = calls_.meet(packet_of({.op = CollectiveOp::kReduceScatter,
                                              .dtype = output.dtype,
                                              .reduction = reduction,
                                              .count = output.count}),
                                   info);
  if (size_ > 1 && reduction_order() == ReductionOrder::kNative &&
      output.count < kMostNativeElements) {
    native_reduce_scatter(native_, input, output, reduction, waiter());
  } else {
    reduce_blocks(reduction, input, output, repeated(output.count, size_));
  }
  calls_.leave(call);
  return {};
}

Work MpiCommunicator::reduce_scatter_uneven(ConstBuffer input, Buffer output, Counts counts,
                                            Reduction reduction, const CallInfo& info) {
  check_buffer(input, "reduce_scatter_uneven", "input");
  check_buffer(output, "reduce_scatter_uneven", "output");
  check_same_dtype(input, output, "reduce_scatter_uneven");
  check_reducible(reduction, output.dtype);
  check_counts(counts, size_, "reduce_scatter_uneven");
  check_total(input, counts, "reduce_scatter_uneven", "input");
  check_own_block(output, counts, rank_, "reduce_scatter_uneven", "output");
  const MetCall call = calls_.meet(packet_of({.op = CollectiveOp::kReduceScatterUneven,
                                              .dtype = output.dtype,
                                              .reduction = reduction,
                                              .count = input.count},
                                             counts),
                                   info);
  reduce_blocks(reduction, input, output, counts);
  calls_.leave(call);
  return {};
}

// In rounds of a chunk over all ranks, so that what others send fits into the scratch.
void MpiCommunicator::reduce_blocks(Reduction reduction, ConstBuffer input, Buffer output,
                                    Counts counts) {
  const Dtype dtype = output.dtype;
  const auto block_of = [&](int rank) {
    return input.data + bytes_of(elements_before(counts, rank), dtype);
  };
  if (size_ == 1) return copy_bytes(output.data, input.data, bytes_of(output.count, dtype));
  if (reduction_order() == ReductionOrder::kNative) {
    for (int root = 0; root < size_; ++root) {
      native_reduce(native_, {block_of(root), counts[static_cast<std::size_t>(root)], dtype},
                    output, root, reduction, waiter());
    }
    return;
  }
  const auto size = static_cast<std::size_t>(size_);
  const std::size_t slot = kChunkBytes / size / kLineBytes * kLineBytes;
  const std::size_t largest = bytes_of(*std::ranges::max_element(counts), dtype);
  make_room(world_->scratch, std::min(slot, largest) * size);
  const auto piece = [&](int rank, std::size_t begin) {
    const std::size_t total = bytes_of(counts[static_cast<std::size_t>(rank)], dtype);
    return begin < total ? std::min(slot, total - begin) : 0;
  };
  for (std::size_t begin = 0; begin < largest; begin += slot) {
    const std::size_t bytes = piece(rank_, begin);
    std::vector<Piece> receives, sends;
    Sources sources(size);
    sources[static_cast<std::size_t>(rank_)] = block_of(rank_) + begin;
    for (int step = 1; step < size_; ++step) {
      const int to = (rank_ + step) % size_, from = (rank_ + size_ - step) % size_;
      sends.push_back({world_rank_of(to), writable(block_of(to) + begin), piece(to, begin)});
      std::byte* const place =
          world_->scratch.data() + std::min(slot, largest) * static_cast<std::size_t>(from);
      receives.push_back({world_rank_of(from), place, bytes});
      sources[static_cast<std::size_t>(from)] = place;
    }
    exchange(receives, sends);
    if (bytes == 0) continue;
    reduce_block_of_rank(reduction_order(), reduction, dtype, sources, rank_, output.data + begin,
                         static_cast<std::int64_t>(bytes / size_of(dtype)));
  }
}

Work MpiCommunicator::all_to_all(ConstBuffer input, Counts input_counts, Buffer output,
                                 Counts output_counts, const CallInfo& info) {
  check_buffer(input, "all_to_all", "input");
  check_buffer(output, "all_to_all", "output");
  check_same_dtype(input, output, "all_to_all");
  check_counts(input_counts, size_, "all_to_all");
  check_counts(output_counts, size_, "all_to_all");
  check_total(input, input_counts, "all_to_all", "input");
  check_total(output, output_counts, "all_to_all", "output");
  check_block_to_itself(input_counts, output_counts, rank_);
  const MetCall call = calls_.meet(
      packet_of({.op = CollectiveOp::kAllToAll, .dtype = input.dtype, .count = input.count},
                input_counts, output_counts),
      info);
  const auto piece_of = [&](int rank, const std::byte* data, Counts counts) {
    return Piece{world_rank_of(rank),
                 writable(data + bytes_of(elements_before(counts, rank), input.dtype)),
                 bytes_of(counts[static_cast<std::size_t>(rank)], input.dtype)};
  };
  std::vector<Piece> receives, sends;
  for (int step = 1; step < size_; ++step) {
    sends.push_back(piece_of((rank_ + step) % size_, input.data, input_counts));
    receives.push_back(piece_of((rank_ + size_ - step) % size_, output.data, output_counts));
  }
  const Piece own = piece_of(rank_, input.data, input_counts);
  copy_bytes(piece_of(rank_, output.data, output_counts).data, own.data, own.bytes);
  exchange(receives, sends);
  calls_.leave(call);
  return {};
}

Work MpiCommunicator::broadcast(Buffer data, int root, const CallInfo& info) {
  check_buffer(data, "broadcast", "data");
  if (root < 0 || root >= size_)
    throw CommError(
        fmt::format("broadcast: the root must be from 0 to {}, got {}", size_ - 1, root));
  const MetCall call = calls_.meet(
      packet_of(
          {.op = CollectiveOp::kBroadcast, .dtype = data.dtype, .root = root, .count = data.count}),
      info);
  const std::size_t bytes = bytes_of(data.count, data.dtype);
  std::vector<Piece> receives, sends;
  if (rank_ == root) {
    for (int step = 1; step < size_; ++step)
      sends.push_back({world_rank_of((rank_ + step) % size_), data.data, bytes});
  } else {
    receives.push_back({world_rank_of(root), data.data, bytes});
  }
  exchange(receives, sends);
  calls_.leave(call);
  return {};
}

}  // namespace isoshard
