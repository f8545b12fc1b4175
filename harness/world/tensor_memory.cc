// SPDX-License-Identifier: Apache-2.0
// LibTorch's CPU allocator over the program's pool.
#include "harness/world/tensor_memory.h"

#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <cstring>

#include "core/memory/memory_pool.h"
#include "harness/world/machine.h"

namespace isoshard {
namespace {

c10::Allocator*& usual_allocator() {
  static c10::Allocator* usual = nullptr;
  return usual;
}

void release(void* context) {
  const auto* const data = static_cast<std::byte*>(context);
  MemoryPool& pool = *program_pool();
  if (!pool.holds(data)) return usual_allocator()->raw_deleter()(context);
  // A forked process frees its tensors too; they are its parent's.
  if (pool.owner_of(data) == ::getpid()) pool.give_back(data);
}

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < MemoryPool::kExtentBytes || owner_ != ::getpid())
      return usual_allocator()->allocate(bytes);
    std::byte* const data = program_pool()->take(bytes, owner_);
    if (data == nullptr) return usual_allocator()->allocate(bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  pid_t owner_ = ::getpid();
};

}  // namespace

void use_pool_for_tensors() {
#if !defined(__SANITIZE_ADDRESS__)
  if (program_pool() == nullptr) return;
  usual_allocator() = c10::GetCPUAllocator();
  static PoolAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
#endif
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
