// SPDX-License-Identifier: Apache-2.0
/// Types and operations for MPI's reductions.
#include "core/comm/mpi/mpi_native.h"

#include <algorithm>
#include <array>
#include <memory>

#include "core/base/float_bits.h"
#include "core/comm/buffers.h"
#include "core/comm/mpi/mpi_job.h"
#include "core/comm/reduce.h"

namespace isoshard {
namespace {

Reduction step_of(Reduction reduction) {
  return reduction == Reduction::kAvg ? Reduction::kSum : reduction;
}

/// One addition of MPI, of a type that it does not know.
template <Dtype kDtype, Reduction kReduction>
void add_of_ours(void* input, void* in_out, int* count, MPI_Datatype* /*type*/) {
  auto* const result = static_cast<std::byte*>(in_out);
  const std::array<const std::byte*, 2> sources = {static_cast<const std::byte*>(input), result};
  reduce_in_hops(kReduction, kDtype, sources, result, *count);
}

template <Dtype kDtype>
MPI_Op own_op(Reduction reduction) {
  static const std::array<MPI_Op, 3> ops = [] {
    std::array<MPI_Op, 3> made{};
    check_mpi(MPI_Op_create(add_of_ours<kDtype, Reduction::kSum>, 1, &made[0]), "MPI_Op_create");
    check_mpi(MPI_Op_create(add_of_ours<kDtype, Reduction::kMin>, 1, &made[1]), "MPI_Op_create");
    check_mpi(MPI_Op_create(add_of_ours<kDtype, Reduction::kMax>, 1, &made[2]), "MPI_Op_create");
    return made;
  }();
  return ops[reduction == Reduction::kMin ? 1 : reduction == Reduction::kMax ? 2 : 0];
}

MPI_Op op_of(Dtype dtype, Reduction reduction) {
  const Reduction step = step_of(reduction);
  switch (dtype) {
    case Dtype::kBFloat16:
      return own_op<Dtype::kBFloat16>(step);
    case Dtype::kFloat16:
      return own_op<Dtype::kFloat16>(step);
    case Dtype::kBool:
      return own_op<Dtype::kBool>(step);
    default:
      return step == Reduction::kMin ? MPI_MIN : step == Reduction::kMax ? MPI_MAX : MPI_SUM;
  }
}

/// Of 16-bit floats and bool: a type without arithmetic, which only our operations take.
MPI_Datatype own_type(int bytes) {
  static const std::array<MPI_Datatype, 2> types = [] {
    std::array<MPI_Datatype, 2> made{};
    for (const int size : {1, 2}) {
      MPI_Datatype& type = made[static_cast<std::size_t>(size - 1)];
      check_mpi(MPI_Type_contiguous(size, MPI_BYTE, &type), "MPI_Type_contiguous");
      check_mpi(MPI_Type_commit(&type), "MPI_Type_commit");
    }
    return made;
  }();
  return types[static_cast<std::size_t>(bytes - 1)];
}

MPI_Datatype type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return MPI_DOUBLE;
    case Dtype::kFloat32:
      return MPI_FLOAT;
    case Dtype::kInt64:
      return MPI_INT64_T;
    case Dtype::kInt32:
      return MPI_INT32_T;
    case Dtype::kInt16:
      return MPI_INT16_T;
    case Dtype::kInt8:
      return MPI_INT8_T;
    case Dtype::kUint8:
      return MPI_UINT8_T;
    case Dtype::kBFloat16:
    case Dtype::kFloat16:
      return own_type(2);
    case Dtype::kBool:
      break;
  }
  return own_type(1);
}

template <class T>
void divide(std::byte* data, std::int64_t count, int num_ranks) {
  auto* const values = reinterpret_cast<T*>(data);
  for (std::int64_t i = 0; i < count; ++i)
    values[i] = static_cast<T>(values[i] / static_cast<T>(num_ranks));
}

template <class Widen, class Narrow>
void divide_16(std::byte* data, std::int64_t count, int num_ranks, Widen widen, Narrow narrow) {
  auto* const values = reinterpret_cast<std::uint16_t*>(data);
  for (std::int64_t i = 0; i < count; ++i)
    values[i] = narrow(widen(values[i]) / static_cast<float>(num_ranks));
}

void divide_by_ranks(MPI_Comm comm, Buffer data) {
  int size = 1;
  check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  switch (data.dtype) {
    case Dtype::kFloat64:
      return divide<double>(data.data, data.count, size);
    case Dtype::kFloat32:
      return divide<float>(data.data, data.count, size);
    case Dtype::kBFloat16:
      return divide_16(data.data, data.count, size, bf16_to_float, float_to_bf16);
    case Dtype::kFloat16:
      return divide_16(data.data, data.count, size, fp16_to_float, float_to_fp16);
    case Dtype::kInt64:
      return divide<std::int64_t>(data.data, data.count, size);
    case Dtype::kInt32:
      return divide<std::int32_t>(data.data, data.count, size);
    case Dtype::kInt16:
      return divide<std::int16_t>(data.data, data.count, size);
    case Dtype::kInt8:
      return divide<std::int8_t>(data.data, data.count, size);
    case Dtype::kUint8:
      return divide<std::uint8_t>(data.data, data.count, size);
    case Dtype::kBool:
      return;  // check_reducible refuses it
  }
}

/// What MPI reduces. Its reductions cannot be cancelled, so one whose wait ends by an exception
/// goes on: it works on memory of its own, which is then never given back.
class Staging {
 public:
  explicit Staging(std::size_t bytes)
      : memory_(std::make_unique_for_overwrite<std::byte[]>(bytes)) {}  // NOLINT: bytes, unfilled
  [[nodiscard]] std::byte* data() const noexcept { return memory_.get(); }
  void wait_for(MPI_Request& request, const WaitForRequest& wait) {
    try {
      wait(request);
    } catch (...) {
      (void)memory_.release();
      throw;
    }
  }

 private:
  std::unique_ptr<std::byte[]> memory_;  // NOLINT: as above
};

}  // namespace

void native_all_reduce(MPI_Comm comm, Buffer data, Reduction reduction,
                       const WaitForRequest& wait) {
  for (std::int64_t begin = 0; begin < data.count; begin += kMostNativeElements) {
    const auto count = static_cast<int>(std::min(kMostNativeElements, data.count - begin));
    const std::size_t bytes = bytes_of(count, data.dtype);
    std::byte* const place = data.data + bytes_of(begin, data.dtype);
    Staging staging(bytes);
    copy_bytes(staging.data(), place, bytes);
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Iallreduce(MPI_IN_PLACE, staging.data(), count, type_of(data.dtype),
                             op_of(data.dtype, reduction), comm, &request),
              "MPI_Iallreduce");
    staging.wait_for(request, wait);
    copy_bytes(place, staging.data(), bytes);
  }
  if (reduction == Reduction::kAvg) divide_by_ranks(comm, data);
}

void native_reduce(MPI_Comm comm, ConstBuffer input, Buffer output, int root, Reduction reduction,
                   const WaitForRequest& wait) {
  int rank = 0;
  check_mpi(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  for (std::int64_t begin = 0; begin < input.count; begin += kMostNativeElements) {
    const auto count = static_cast<int>(std::min(kMostNativeElements, input.count - begin));
    const std::size_t offset = bytes_of(begin, input.dtype), bytes = bytes_of(count, input.dtype);
    Staging staging(rank == root ? 2 * bytes : bytes);  // the result behind the input
    std::byte* const result = rank == root ? staging.data() + bytes : nullptr;
    copy_bytes(staging.data(), input.data + offset, bytes);
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Ireduce(staging.data(), result, count, type_of(input.dtype),
                          op_of(input.dtype, reduction), root, comm, &request),
              "MPI_Ireduce");
    staging.wait_for(request, wait);
    if (rank == root) copy_bytes(output.data + offset, result, bytes);
  }
  if (reduction == Reduction::kAvg && rank == root) divide_by_ranks(comm, output);
}

void native_reduce_scatter(MPI_Comm comm, ConstBuffer input, Buffer output, Reduction reduction,
                           const WaitForRequest& wait) {
  const std::size_t in = bytes_of(input.count, input.dtype);
  const std::size_t out = bytes_of(output.count, output.dtype);
  Staging staging(in + out);
  std::byte* const result = staging.data() + in;
  copy_bytes(staging.data(), input.data, in);
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Ireduce_scatter_block(staging.data(), result, static_cast<int>(output.count),
                                      type_of(output.dtype), op_of(output.dtype, reduction), comm,
                                      &request),
            "MPI_Ireduce_scatter_block");
  staging.wait_for(request, wait);
  copy_bytes(output.data, result, out);
  if (reduction == Reduction::kAvg) divide_by_ranks(comm, output);
}

}  // namespace isoshard
