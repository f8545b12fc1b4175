// SPDX-License-Identifier: Apache-2.0
/// Peer of bench_all_reduce: MPI_Allreduce of fp32, and of bf16 an all-to-all, a sum in rank order
/// with an fp32 accumulator and an all-gather (MPI has no such type), in the same sizes, timed the
/// same way.
///
///     mpirun -n RANKS --oversubscribe --bind-to none --mca mpi_yield_when_idle 1
///       bench_mpi_all_reduce
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

float widen(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

std::uint16_t narrow(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct Ranks {
  int rank = 0;
  int size = 1;
};

void all_reduce_bf16(const Ranks& ranks, std::vector<char>& data, std::vector<char>& parts,
                     std::vector<char>& result) {
  const auto part = static_cast<int>(data.size()) / ranks.size;
  const int count = part / 2;
  MPI_Alltoall(data.data(), part, MPI_BYTE, parts.data(), part, MPI_BYTE, MPI_COMM_WORLD);
  const auto* const in = reinterpret_cast<const std::uint16_t*>(parts.data());
  auto* const out = reinterpret_cast<std::uint16_t*>(result.data()) + ranks.rank * count;
  for (int i = 0; i < count; ++i) {
    float sum = widen(in[i]);
    for (int rank = 1; rank < ranks.size; ++rank) sum += widen(in[rank * count + i]);
    out[i] = narrow(sum);
  }
  MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, result.data(), part, MPI_BYTE, MPI_COMM_WORLD);
}

void measure(const Ranks& ranks, bool is_bf16, std::size_t bytes) {
  std::vector<char> data(bytes);
  std::vector<char> parts(bytes);
  std::vector<char> result(bytes);
  const int repetitions =
      static_cast<int>(std::clamp<std::size_t>((std::size_t{256} << 20) / bytes, 9, 2000));
  std::vector<double> times_ms;
  for (int repetition = -3; repetition < repetitions; ++repetition) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    if (is_bf16) {
      all_reduce_bf16(ranks, data, parts, result);
    } else {
      MPI_Allreduce(MPI_IN_PLACE, data.data(), static_cast<int>(bytes / 4), MPI_FLOAT, MPI_SUM,
                    MPI_COMM_WORLD);
    }
    if (repetition >= 0) times_ms.push_back((MPI_Wtime() - start) * 1e3);
  }
  std::sort(times_ms.begin(), times_ms.end());
  if (ranks.rank != 0) return;
  std::printf("openmpi %d ranks %s %6zu KiB  median %8.4f ms  best %8.4f ms\n", ranks.size,
              is_bf16 ? "bf16" : "fp32", bytes >> 10, times_ms[times_ms.size() / 2],
              times_ms.front());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--help") != 0) continue;
    std::puts(
        "usage: mpirun -n RANKS bench_mpi_all_reduce [--attach]   its ranks are always processes "
        "of mpirun");
    return 0;
  }
  MPI_Init(&argc, &argv);
  Ranks ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &ranks.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks.size);
  for (const bool is_bf16 : {false, true}) {
    for (const std::size_t kib : {1, 16, 64, 256, 1024, 4096, 16384, 65536})
      measure(ranks, is_bf16, kib << 10);
  }
  MPI_Finalize();
}
