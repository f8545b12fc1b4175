// SPDX-License-Identifier: Apache-2.0
/// Collectives on bytes: the one interface that every backend implements and every strategy is
/// written against.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/dtype.h"
#include "core/comm/call_info.h"

namespace isoshard {

enum class Reduction : std::uint8_t { kSum, kAvg, kMin, kMax };
[[nodiscard]] std::string_view name_of(Reduction reduction) noexcept;

/// In which order and precision a reduction adds; docs/internals/reduction.md has the formulas.
/// kOrdered: rank order; accumulator fp64 for fp64, fp32 for fp32, bf16 and fp16, the type itself
/// for integers; avg divides in the accumulator by the group size; one rounding at the end. kRing:
/// a rounding to the dtype at every rank, along a ring that starts elsewhere for each chunk. kTree:
/// pairs, then pairs of pairs, a rounding each. Both divide for avg after all additions. kNative:
/// the order of the library below, if there is one.
enum class ReductionOrder : std::uint8_t { kOrdered, kRing, kTree, kNative };
[[nodiscard]] std::string_view name_of(ReductionOrder order) noexcept;
/// Errors   UsageError that lists ordered, ring, tree, native.
[[nodiscard]] ReductionOrder parse_reduction_order(std::string_view name);

/// Where a buffer's memory is.
struct Device {
  enum class Kind : std::uint8_t { kCpu, kCuda } kind = Kind::kCpu;
  int index = 0;  ///< among those of its kind
  friend bool operator==(const Device&, const Device&) = default;
};
[[nodiscard]] std::string name_of(const Device& device);  ///< "cpu", "cuda:1"

/// A contiguous run of `count` elements. Not owned.
struct Buffer {
  std::byte* data = nullptr;
  std::int64_t count = 0;
  Dtype dtype = Dtype::kFloat32;
  Device device{};
  /// The device's stream that a collective is ordered on; nullptr: the default one
  void* stream = nullptr;
};
struct ConstBuffer {
  const std::byte* data = nullptr;
  std::int64_t count = 0;
  Dtype dtype = Dtype::kFloat32;
  Device device{};
  void* stream = nullptr;
  ConstBuffer() = default;
  ConstBuffer(const std::byte* data_in, std::int64_t count_in, Dtype dtype_in)
      : data(data_in), count(count_in), dtype(dtype_in) {}
  // NOLINT: as span converts
  ConstBuffer(const Buffer& buffer)
      : data(buffer.data),
        count(buffer.count),
        dtype(buffer.dtype),
        device(buffer.device),
        stream(buffer.stream) {}
};

/// One send or recv of a grouped call.
struct Transfer {
  bool is_send = true;
  int peer = 0;   ///< rank in the group; a rank may send to itself if it receives as much
  Buffer data{};  ///< only read by a send
  CallInfo info{};
};

/// A collective under way. Its buffers must live and stay untouched until wait() returns.
///
/// Guarantees   wait() returns when the result is in place, throws what the collective throws, and
///              may be called again. A Work that is destroyed without wait() has been waited for. A
///              backend that has moved all data when the call returns (shm, thread) throws from the
///              call itself.
class Work {
 public:
  Work() = default;  ///< done already
  explicit Work(std::function<void()> complete) : complete_(std::move(complete)) {}
  Work(Work&& other) noexcept : complete_(std::exchange(other.complete_, nullptr)) {}
  Work& operator=(Work&& other) noexcept;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  ~Work();
  void wait();

 private:
  std::function<void()> complete_;
};

/// A group of ranks that call the same collectives in the same order.
///
/// Requires     every rank of the group makes every call, with equal op, dtype, count, reduction
///              and root, from one thread. send, recv and send_recv concern the ranks named only;
///              all transfers between two ranks of a group are matched in the order of their calls,
///              and inside a grouped call those from the lower rank come first.
/// Guarantees   results do not depend on timing; a group of one journals the call and moves
///              nothing.
/// Errors       CommError on every rank of the group at once if the calls differ (it names op,
///              dtype, count of both sides), if a peer is lost or the world is aborted;
///              TimeoutError at the world's deadline.
/// Determinism  as reduction_order() says; the same on every rank, bit for bit.
///
///     Work work = comm.all_reduce({bytes, count, Dtype::kFloat32}, Reduction::kSum,
///       {Purpose::kGradReduce, Axis::kDp});
///     work.wait();
class Communicator {
 public:
  virtual ~Communicator() = default;
  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  [[nodiscard]] virtual ReductionOrder reduction_order() const noexcept = 0;
  /// The world rank of `rank` in this group.
  [[nodiscard]] virtual int world_rank_of(int rank) const = 0;

  /// In place: data becomes the reduction of all ranks' data.
  virtual Work all_reduce(Buffer data, Reduction reduction, const CallInfo& info) = 0;
  /// output holds size() blocks of input.count elements, in rank order.
  virtual Work all_gather(ConstBuffer input, Buffer output, const CallInfo& info) = 0;
  /// input holds size() blocks of output.count elements; rank r receives the reduction of block r.
  virtual Work reduce_scatter(ConstBuffer input, Buffer output, Reduction reduction,
                              const CallInfo& info) = 0;
  /// Blocks of counts[r] elements, the same counts on every rank; input is this rank's block,
  /// output all in rank order.
  virtual Work all_gather_uneven(ConstBuffer input, Buffer output,
                                 std::span<const std::int64_t> counts, const CallInfo& info) = 0;
  /// input holds blocks of counts[r] elements, the same counts on every rank; rank r receives the
  /// reduction of block r.
  virtual Work reduce_scatter_uneven(ConstBuffer input, Buffer output,
                                     std::span<const std::int64_t> counts, Reduction reduction,
                                     const CallInfo& info) = 0;
  /// input holds one block per rank, input_counts[r] elements for rank r; output receives
  /// output_counts[r] elements from rank r.
  virtual Work all_to_all(ConstBuffer input, std::span<const std::int64_t> input_counts,
                          Buffer output, std::span<const std::int64_t> output_counts,
                          const CallInfo& info) = 0;
  /// Blocks of equal size. Errors   ShapeError if input.count is not divisible by size().
  Work all_to_all(ConstBuffer input, Buffer output, const CallInfo& info);
  /// Sends to and receives from another rank of the group. A send may wait until the other side
  /// receives (shm and thread do), so ranks that send to each other must call send_recv.
  virtual Work send(ConstBuffer data, int to, const CallInfo& info) = 0;
  virtual Work recv(Buffer data, int from, const CallInfo& info) = 0;
  /// Makes all transfers at once. Their order matters only between the same two ranks in the same
  /// direction.
  virtual Work send_recv(std::span<const Transfer> transfers) = 0;
  virtual Work broadcast(Buffer data, int root, const CallInfo& info) = 0;
  virtual void barrier(const CallInfo& info) = 0;
  /// New groups: ranks with the same color, in the order of (key, rank). Every rank of this group
  /// calls it.
  [[nodiscard]] virtual std::unique_ptr<Communicator> split(int color, int key) = 0;
  /// Makes every pending and later collective of the world fail with CommError(reason). Local, does
  /// not block.
  virtual void abort(std::string_view reason) noexcept = 0;
};

/// Wraps the communicator of a rank: what records calls, delays them or makes a fault.
using CommDecorator =
    std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator> inner, int rank)>;

}  // namespace isoshard
