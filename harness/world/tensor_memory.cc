// SPDX-License-Identifier: Apache-2.0
// LibTorch's CPU allocator over the program's pool, with every block filled.
#include "harness/world/tensor_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>

#include "core/base/error.h"
#include "core/memory/memory_pool.h"
#include "core/memory/unwritten.h"
#include "harness/world/machine.h"

namespace isoshard {
namespace {

c10::Allocator*& usual_allocator() {
  static c10::Allocator* usual = nullptr;
  return usual;
}

// Address sanitizers have an allocator of their own, which must see each block.
MemoryPool* pool_of_tensors() {
#if defined(__SANITIZE_ADDRESS__)
  return nullptr;
#else
  static MemoryPool* const pool = program_pool().get();
  return pool;
#endif
}

void release(void* context) {
  const auto* const data = static_cast<std::byte*>(context);
  MemoryPool* const pool = pool_of_tensors();
  if (pool == nullptr || !pool->holds(data)) return usual_allocator()->raw_deleter()(context);
  // A forked process frees its tensors too; they are its parent's.
  if (pool->owner_of(data) == ::getpid()) pool->give_back(data);
}

// LibTorch says it in the words of its source, with a page of addresses.
[[noreturn]] void throw_refused(std::size_t bytes) {
  rlimit limit{};
  ::getrlimit(RLIMIT_AS, &limit);
  throw InfrastructureError(fmt::format(
      "a tensor of {} bytes was refused: memory is short; {} bytes of the machine's are free, "
      "RLIMIT_AS (ulimit -v) is {}; take a smaller case or give it more memory",
      bytes, memory_of_machine().available_bytes,
      limit.rlim_cur == RLIM_INFINITY ? "unlimited" : fmt::format("{}", limit.rlim_cur)));
}

/// Only the bytes asked for are filled, and when they are handed out: the tensor's first use then
/// finds them in the cache.
class TensorAllocator final : public c10::Allocator {
 public:
  explicit TensorAllocator(std::uint16_t unwritten) : unwritten_(unwritten) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr block = unfilled(bytes);
    if (block) fill_unwritten(static_cast<std::byte*>(block.get()), bytes, unwritten_);
    return block;
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  c10::DataPtr unfilled(std::size_t bytes) {
    const bool is_of_pool =
        bytes >= MemoryPool::kExtentBytes && pool_ != nullptr && owner_ == ::getpid();
    std::byte* const data = is_of_pool ? pool_->take(bytes, owner_) : nullptr;
    if (data != nullptr) return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
    try {
      return usual_allocator()->allocate(bytes);
    } catch (const c10::Error&) {
      throw_refused(bytes);
    }
  }

  MemoryPool* pool_ = pool_of_tensors();
  pid_t owner_ = ::getpid();
  std::uint16_t unwritten_;
};

}  // namespace

void prepare_tensor_memory(std::uint64_t run) {
  usual_allocator() = c10::GetCPUAllocator();
  static TensorAllocator allocator(unwritten_word(run));
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
}

void reclaim_tensor_memory(pid_t gone) {
  MemoryPool* const pool = program_pool().get();
  if (pool == nullptr || pool->high_water() == 0) return;
  pool->reclaim(gone);
  constexpr std::int64_t kScarce = 4;  // a quarter of the memory
  const MachineMemory memory = memory_of_machine();
  if (memory.available_bytes < memory.bytes / kScarce) pool->trim();
}

}  // namespace isoshard
