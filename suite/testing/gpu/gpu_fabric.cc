// SPDX-License-Identifier: Apache-2.0
/// One ring for each two processes and direction, with one writer and one reader.
#include "suite/testing/gpu/gpu_fabric.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "core/base/error.h"

namespace isoshard {
namespace {

constexpr std::uint64_t kMaxComms = std::uint64_t{1} << 16;
constexpr std::uint64_t kRingBytes = std::uint64_t{512} << 10;

}  // namespace

/// Bytes of one process for another one.
struct GpuFabric::Ring {
  std::atomic<std::uint64_t> written;
  std::atomic<std::uint64_t> read;
  std::array<std::byte, kRingBytes> data;

  void put(std::uint64_t at, const void* from, std::size_t bytes) {
    const std::size_t begin = at % kRingBytes, first = std::min(bytes, kRingBytes - begin);
    std::memcpy(data.data() + begin, from, first);
    std::memcpy(data.data(), static_cast<const std::byte*>(from) + first, bytes - first);
  }
  void get(std::uint64_t at, void* to, std::size_t bytes) const {
    const std::size_t begin = at % kRingBytes, first = std::min(bytes, kRingBytes - begin);
    std::memcpy(to, data.data() + begin, first);
    std::memcpy(static_cast<std::byte*>(to) + first, data.data(), bytes - first);
  }
};

struct GpuFabric::Comm {
  std::atomic<int> num_arrived;
  std::array<std::atomic<int>, kMaxRanks> processes;
};

struct GpuFabric::Shared {
  std::atomic<std::uint64_t> next_id;
  std::array<Comm, kMaxComms> comms;
  std::array<std::array<Ring, kMaxRanks>, kMaxRanks> rings;
};

GpuFabric::GpuFabric(int num_ranks) : num_ranks_(num_ranks), bytes_(sizeof(Shared)) {
  if (num_ranks > kMaxRanks)
    throw UsageError(
        fmt::format("the stand-in has at most {} ranks, got {}", kMaxRanks, num_ranks));
  void* const made = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) throw InfrastructureError("no memory for the stand-in's wires");
  shared_ = static_cast<Shared*>(made);  // zeroed, as all of it begins
}

GpuFabric::~GpuFabric() {
  ::munmap(shared_, bytes_);
}

GpuFabric::Ring& GpuFabric::ring(int from, int to) const {
  return shared_->rings[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
}

std::uint64_t GpuFabric::new_id() {
  const std::uint64_t id = shared_->next_id.fetch_add(1);
  if (id >= kMaxComms)
    throw InfrastructureError("the stand-in has no room for another communicator");
  return id;
}

std::uint64_t GpuFabric::num_ids() const {
  return shared_->next_id.load();
}

void GpuFabric::arrive(std::uint64_t id, int rank, int process) {
  Comm& comm = shared_->comms.at(id);
  comm.processes[static_cast<std::size_t>(rank)].store(process);
  comm.num_arrived.fetch_add(1);
}

int GpuFabric::num_arrived(std::uint64_t id) const {
  return shared_->comms.at(id).num_arrived.load();
}

int GpuFabric::process_of(std::uint64_t id, int rank) const {
  return shared_->comms.at(id).processes[static_cast<std::size_t>(rank)].load();
}

bool GpuFabric::write(int from, int to, const Frame& frame, const std::byte* data) {
  Ring& wire = ring(from, to);
  const std::uint64_t at = wire.written.load(std::memory_order_relaxed);
  const std::uint64_t used = at - wire.read.load(std::memory_order_acquire);
  if (kRingBytes - used < sizeof frame + frame.bytes) return false;
  wire.put(at, &frame, sizeof frame);
  wire.put(at + sizeof frame, data, frame.bytes);
  wire.written.store(at + sizeof frame + frame.bytes, std::memory_order_release);
  return true;
}

bool GpuFabric::read(int from, int to, Frame& frame, std::vector<std::byte>& data) {
  Ring& wire = ring(from, to);
  const std::uint64_t at = wire.read.load(std::memory_order_relaxed);
  if (wire.written.load(std::memory_order_acquire) == at) return false;
  wire.get(at, &frame, sizeof frame);
  const std::size_t before = data.size();
  data.resize(before + frame.bytes);
  wire.get(at + sizeof frame, data.data() + before, frame.bytes);
  wire.read.store(at + sizeof frame + frame.bytes, std::memory_order_release);
  return true;
}

}  // namespace isoshard
