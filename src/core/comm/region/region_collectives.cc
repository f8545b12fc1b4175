// SPDX-License-Identifier: Apache-2.0
/// How data moves through the windows.
///
/// A tensor larger than a buffer goes in *chunks*. A rank publishes its part of a chunk in its own
/// buffer, meets the others, then reads theirs. Chunks take the two buffers of a window in turn,
/// across calls too. That is why one meeting per chunk is enough: when a rank writes to a buffer
/// again, it has passed the meeting of the chunk between, and nobody came to that meeting before
/// having read everything of the chunk before it.
///
/// Small all-reduces: every rank publishes all, meets, and reduces all for itself. Larger ones: the
/// chunk is cut into one *slice* per rank; rank r reduces slice r, leaves the result in slice r of
/// its buffer (which holds no input: its own input is in its own tensor), meets, and collects the
/// other slices. The meeting after the reduction is that of the next chunk's inputs as well. A
/// slice has the same place in the buffer in every chunk of a call, also in the last, shorter one:
/// inputs that run one chunk ahead of a slow reader never touch a slice of results.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/base/error.h"
#include "core/comm/buffers.h"
#include "core/comm/reduce.h"
#include "core/comm/region/region_communicator.h"

namespace isoshard {
namespace {

// Up to this size a second meeting costs more than reducing everything on every rank.
constexpr std::size_t kAtOnceBytes = std::size_t{8} << 10;
// A result is copied to the buffer in pieces that are still in the first-level cache.
constexpr std::int64_t kPieceBytes = 8 << 10;
constexpr std::int64_t kCacheLineBytes = 64;

using Sources = std::array<const std::byte*, kMaxRegionRanks>;

}  // namespace

// One chunk of an all-reduce in slices. Counts are in elements.
struct RegionCommunicator::ChunkOfSlices {
  std::byte* data;       ///< this rank's tensor, from the chunk's first element
  std::int64_t offset;   ///< of that element in the tensor
  std::int64_t count;    ///< of the chunk
  std::int64_t stride;   ///< from slice to slice in the buffer
  std::int64_t slice;    ///< elements of a full slice of this chunk
  std::uint64_t number;  ///< says which buffer
  Dtype dtype;

  [[nodiscard]] std::int64_t begin(int rank) const { return std::min(count, slice * rank); }
  [[nodiscard]] std::int64_t size(int rank) const {
    return std::min(count, slice * (rank + 1)) - begin(rank);
  }
  [[nodiscard]] std::byte* of_tensor(int rank) const { return data + bytes_of(begin(rank), dtype); }
  [[nodiscard]] std::size_t buffer_offset(int rank) const { return bytes_of(stride * rank, dtype); }
  [[nodiscard]] std::size_t bytes(int rank) const { return bytes_of(size(rank), dtype); }
};

Work RegionCommunicator::all_reduce(Buffer data, Reduction reduction, const CallInfo& info) {
  check_buffer(data, "all_reduce", "data");
  check_reducible(reduction, data.dtype);
  Call call = enter({.op = CollectiveOp::kAllReduce,
                     .dtype = data.dtype,
                     .reduction = reduction,
                     .count = data.count},
                    info);
  if (group_ != nullptr) {
    if (bytes_of(data.count, data.dtype) <= kAtOnceBytes) {
      all_reduce_at_once(call, data);
    } else {
      all_reduce_in_slices(call, data);
    }
  }
  leave(call);
  return {};
}

void RegionCommunicator::all_reduce_at_once(Call& call, Buffer data) {
  const std::uint64_t chunk = num_chunks_++;
  const std::size_t bytes = bytes_of(data.count, data.dtype);
  copy_bytes(own_buffer(chunk, bytes), data.data, bytes);
  meet_others(call);
  Sources sources{};
  for (int from = 0; from < size_; ++from)
    sources[static_cast<std::size_t>(from)] = from == rank_ ? data.data : buffer(from, chunk);
  reduce_part(reduction_order(), call.call.reduction, data.dtype,
              {sources.data(), static_cast<std::size_t>(size_)}, {0, data.count}, data.data,
              data.count);
}

void RegionCommunicator::all_reduce_in_slices(Call& call, Buffer data) {
  const auto element_bytes = static_cast<std::int64_t>(size_of(data.dtype));
  const std::int64_t line = kCacheLineBytes / element_bytes;
  const auto lines_of = [&](std::int64_t count) {
    return (count + size_ * line - 1) / (size_ * line);
  };
  const std::int64_t most_lines =
      static_cast<std::int64_t>(kBufferBytes) / (kCacheLineBytes * size_);
  const std::int64_t num_chunks = (lines_of(data.count) + most_lines - 1) / most_lines;
  const std::int64_t stride = (lines_of(data.count) + num_chunks - 1) / num_chunks * line;
  const auto chunk_at = [&](std::int64_t index) {
    const std::int64_t begin = std::min(data.count, index * stride * size_);
    const std::int64_t count = std::min(data.count - begin, stride * size_);
    return ChunkOfSlices{.data = data.data + begin * element_bytes,
                         .offset = begin,
                         .count = count,
                         .stride = stride,
                         .slice = lines_of(count) * line,
                         .number = num_chunks_ + static_cast<std::uint64_t>(index),
                         .dtype = data.dtype};
  };
  publish_slices(chunk_at(0));
  meet_others(call);
  for (std::int64_t index = 0; index < num_chunks; ++index) {
    const ChunkOfSlices chunk = chunk_at(index);
    reduce_own_slice(chunk, call.call);
    if (index + 1 < num_chunks) publish_slices(chunk_at(index + 1));
    meet_others(call);
    collect_slices(chunk);
  }
  num_chunks_ += static_cast<std::uint64_t>(num_chunks);
}

void RegionCommunicator::publish_slices(const ChunkOfSlices& chunk) {
  std::byte* const own = own_buffer(chunk.number, chunk.buffer_offset(size_));
  for (int step = 1; step < size_; ++step) {
    const int to = (rank_ + step) % size_;
    copy_bytes(own + chunk.buffer_offset(to), chunk.of_tensor(to), chunk.bytes(to));
  }
}

void RegionCommunicator::reduce_own_slice(const ChunkOfSlices& chunk, const CollectiveCall& call) {
  const auto piece = kPieceBytes / static_cast<std::int64_t>(size_of(chunk.dtype));
  std::byte* const result = buffer(rank_, chunk.number) + chunk.buffer_offset(rank_);
  for (std::int64_t begin = 0; begin < chunk.size(rank_); begin += piece) {
    const std::int64_t count = std::min(piece, chunk.size(rank_) - begin);
    const std::size_t offset = bytes_of(begin, chunk.dtype);
    std::byte* const own = chunk.of_tensor(rank_) + offset;
    Sources sources{};
    for (int from = 0; from < size_; ++from) {
      sources[static_cast<std::size_t>(from)] =
          from == rank_ ? own : buffer(from, chunk.number) + chunk.buffer_offset(rank_) + offset;
    }
    reduce_part(reduction_order(), call.reduction, chunk.dtype,
                {sources.data(), static_cast<std::size_t>(size_)},
                {chunk.offset + chunk.begin(rank_) + begin, call.count}, own, count);
    copy_bytes(result + offset, own, bytes_of(count, chunk.dtype));
  }
}

void RegionCommunicator::collect_slices(const ChunkOfSlices& chunk) const {
  for (int step = 1; step < size_; ++step) {
    const int from = (rank_ + step) % size_;
    copy_bytes(chunk.of_tensor(from), buffer(from, chunk.number) + chunk.buffer_offset(from),
               chunk.bytes(from));
  }
}

Work RegionCommunicator::broadcast(Buffer data, int root, const CallInfo& info) {
  check_buffer(data, "broadcast", "data");
  if (root < 0 || root >= size_)
    throw CommError(
        fmt::format("broadcast: the root must be from 0 to {}, got {}", size_ - 1, root));
  Call call = enter(
      {.op = CollectiveOp::kBroadcast, .dtype = data.dtype, .root = root, .count = data.count},
      info);
  if (group_ != nullptr) {
    const std::size_t total = bytes_of(data.count, data.dtype);
    std::size_t begin = 0;
    do {
      const std::size_t bytes = std::min(kBufferBytes, total - begin);
      const std::uint64_t chunk = num_chunks_++;
      if (rank_ == root) copy_bytes(own_buffer(chunk, bytes), data.data + begin, bytes);
      meet_others(call);
      if (rank_ != root) copy_bytes(data.data + begin, buffer(root, chunk), bytes);
      begin += bytes;
    } while (begin < total);
  }
  leave(call);
  return {};
}

}  // namespace isoshard
