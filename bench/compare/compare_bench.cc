// SPDX-License-Identifier: Apache-2.0
/// All statistics of two tensors against memcmp of the same buffers in the same rounds, on one
/// core.
///
///     compare_bench [ROUNDS [SET...]] GB/s, both inputs counted; SET: plain, avx2, avx512
///       (default: the one accumulate() takes)
///
/// equal: the same bits. some: one element of 64 is one step away. all: every element is 0 to 3
/// steps away. unrelated: two independent tensors. memcmp sees equal buffers in every row, as it
/// stops at the first difference.
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "bench/attach/refuse_attach.h"
#include "core/base/float_bits.h"
#include "harness/stats/stats_kernels.h"

namespace isoshard {
namespace {

/// Memory of its own pages, huge where the system gives them.
struct Buffer {
  explicit Buffer(std::size_t size) : bytes(size) {
    data = static_cast<std::byte*>(
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    madvise(data, size, MADV_HUGEPAGE);
  }
  ~Buffer() { munmap(data, bytes); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::byte* data;
  std::size_t bytes;
};

enum class Change { kEqual, kSome, kAll, kUnrelated };
constexpr std::pair<Change, const char*> kChanges[] = {{Change::kEqual, "equal"},
                                                       {Change::kSome, "some"},
                                                       {Change::kAll, "all"},
                                                       {Change::kUnrelated, "unrelated"}};

template <class Bits, class Encode>
void fill(Buffer& reference, Buffer& actual, Change change, Encode encode) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<Bits> values(1 << 16);
  for (Bits& value : values) value = encode(normal(generator));
  const std::size_t count = reference.bytes / sizeof(Bits);
  for (std::size_t i = 0; i < count; ++i) {
    const Bits r = values[(i * 7 + i / values.size()) % values.size()];
    Bits a = r;
    if (change == Change::kSome && i % 64 == 5) a = static_cast<Bits>(a + 1);
    if (change == Change::kAll) a = static_cast<Bits>(a + i % 4);
    if (change == Change::kUnrelated) a = values[(i * 5 + 3) % values.size()];
    std::memcpy(reference.data + i * sizeof(Bits), &r, sizeof(Bits));
    std::memcpy(actual.data + i * sizeof(Bits), &a, sizeof(Bits));
  }
}

/// CPU time, so that other programs on the machine take no part but of the memory's bandwidth.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

template <class Run>
double seconds(Run run) {
  const double start = cpu_seconds();
  run();
  return cpu_seconds() - start;
}

struct Rate {
  double best = 0, median = 0;
};

Rate rate_of(std::vector<double> times, std::size_t bytes) {
  std::ranges::sort(times);
  return {static_cast<double>(bytes) / times.front() / 1e9,
          static_cast<double>(bytes) / times[times.size() / 2] / 1e9};
}

void measure(const StatsKernels& kernels, Dtype dtype, std::size_t bytes, Change change,
             const char* name, int rounds) {
  Buffer reference(bytes);
  Buffer actual(bytes);
  Buffer copy(bytes);
  if (dtype == Dtype::kFloat32) {
    fill<std::uint32_t>(reference, actual, change,
                        [](float x) { return std::bit_cast<std::uint32_t>(x); });
  } else {
    fill<std::uint16_t>(reference, actual, change, float_to_bf16);
  }
  std::memcpy(copy.data, reference.data, bytes);
  const auto count = static_cast<std::int64_t>(bytes / size_of(dtype));
  const int inner = bytes <= std::size_t{4} << 20 ? 20 : 1;
  std::vector<double> with_memcmp;
  std::vector<double> with_stats;
  int differs = 0;
  Stats last;
  for (int round = -1; round < rounds; ++round) {
    std::vector<double> a;
    std::vector<double> b;
    for (int i = 0; i < inner; ++i)
      a.push_back(seconds([&] { differs |= std::memcmp(reference.data, copy.data, bytes); }));
    for (int i = 0; i < inner; ++i) {
      b.push_back(seconds([&] {
        last = {};
        accumulate_with(kernels, last, reference.data, dtype, actual.data, dtype, count, 0);
      }));
    }
    if (round < 0) continue;
    with_memcmp.insert(with_memcmp.end(), a.begin(), a.end());
    with_stats.insert(with_stats.end(), b.begin(), b.end());
  }
  if (differs != 0 || last.numel != count) std::abort();
  const Rate memory = rate_of(with_memcmp, 2 * bytes);
  const Rate ours = rate_of(with_stats, 2 * bytes);
  fmt::print(
      "{:<7} {:<5} {:>4} MiB  {:<10} best {:6.1f} median {:6.1f} GB/s   memcmp {:6.1f} {:6.1f}   "
      "ratio {:.2f} {:.2f}\n",
      kernels.name, name_of(dtype), bytes >> 20, name, ours.best, ours.median, memory.best,
      memory.median, ours.best / memory.best, ours.median / memory.median);
}

/// The digest of one tensor, which recording takes beside the comparison.
void measure_digest(std::size_t bytes, int rounds) {
  Buffer data(bytes);
  std::memset(data.data, 1, bytes);
  std::vector<double> times;
  std::uint64_t last = 0;
  for (int round = 0; round < rounds * 3; ++round)
    times.push_back(seconds([&] { last ^= digest_of(data.data, bytes, last); }));
  const Rate ours = rate_of(times, bytes);
  fmt::print("digest        {:>4} MiB             best {:6.1f} median {:6.1f} GB/s of one input\n",
             bytes >> 20, ours.best, ours.median);
}

}  // namespace
}  // namespace isoshard

int main(int argc, char** argv) {
  using namespace isoshard;
  refuse_attach(argc, argv, "usage: compare_bench [ROUNDS [KERNELS...]]   e.g. 5 avx2",
                "it compares tensors in one process, without ranks");
  const int rounds = argc > 1 ? std::max(1, std::atoi(argv[1])) : 9;
  std::vector<const StatsKernels*> sets;
  for (const StatsKernels* kernels : stats_kernels()) {
    for (int i = 2; i < argc; ++i) {
      if (std::string_view(argv[i]) == kernels->name) sets.push_back(kernels);
    }
  }
  if (argc > 2 && static_cast<int>(sets.size()) != argc - 2) {
    fmt::print(stderr, "compare_bench: this CPU has");
    for (const StatsKernels* kernels : stats_kernels()) fmt::print(stderr, " {}", kernels->name);
    fmt::print(stderr, "\n");
    return 2;
  }
  for (const std::size_t mib : {std::size_t{4}, std::size_t{256}})
    measure_digest(mib << 20, rounds);
  if (sets.empty()) sets = {stats_kernels().back()};
  for (const StatsKernels* kernels : sets) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      for (const std::size_t mib : {std::size_t{4}, std::size_t{256}}) {
        for (const auto& [change, name] : kChanges)
          measure(*kernels, dtype, mib << 20, change, name, rounds);
      }
    }
  }
}
