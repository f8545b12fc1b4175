// SPDX-License-Identifier: Apache-2.0
// A table of owners beside one mapping, and LibTorch's CPU allocator over both.
#include "harness/world/tensor_pool.h"

#include <c10/core/CPUAllocator.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "harness/world/machine.h"

namespace isoshard {
namespace {

struct Extent {
  std::atomic<pid_t> owner{0};          // 0: free
  std::atomic<std::uint32_t> count{0};  // of the piece that begins here
};
static_assert(std::atomic<pid_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free, "shared between processes");

constexpr std::size_t kPage = 4096;
/// Smaller pieces lie in the upper half: one in a gap that a weight's gradient left would keep the next one from fitting.
constexpr std::size_t kLargeBytes = std::size_t{32} << 20;

std::size_t extents_of(std::size_t bytes) {
  return (bytes + TensorPool::kExtentBytes - 1) / TensorPool::kExtentBytes;
}

}  // namespace

struct TensorPool::Impl {
  std::size_t count = 0;  // extents
  int fd = -1;
  std::byte* mapping = nullptr;  // owners, then extents
  std::byte* extents = nullptr;
  std::size_t mapped = 0;

  struct Header {
    std::atomic<std::size_t> high_water{0};  // one above the highest extent that was ever taken
  };
  [[nodiscard]] Header& header() const noexcept { return *reinterpret_cast<Header*>(mapping); }
  [[nodiscard]] Extent* table() const noexcept { return reinterpret_cast<Extent*>(mapping + sizeof(Header)); }

  // Owns [first, first + wanted), or nothing and false.
  bool claim(std::size_t first, std::size_t wanted, pid_t owner) const noexcept {
    for (std::size_t i = first; i < first + wanted; ++i) {
      pid_t free = 0;
      if (table()[i].owner.compare_exchange_strong(free, owner, std::memory_order_acq_rel)) continue;
      while (i-- > first) table()[i].owner.store(0, std::memory_order_release);
      return false;
    }
    return true;
  }

  void raise_high_water(std::size_t to) const noexcept {
    std::size_t seen = header().high_water.load(std::memory_order_relaxed);
    while (seen < to && !header().high_water.compare_exchange_weak(seen, to, std::memory_order_relaxed)) {
    }
  }

  ~Impl() {
    if (mapping != nullptr) ::munmap(mapping, mapped);
    if (fd >= 0) ::close(fd);
  }
};

TensorPool::TensorPool(std::size_t bytes) : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  const auto fail = [](std::string_view what) {
    throw InfrastructureError(fmt::format("memory for tensors: {} failed: {}", what, std::strerror(errno)));
  };
  impl.count = bytes / kExtentBytes;
  const std::size_t table = extents_of(sizeof(Impl::Header) + impl.count * sizeof(Extent)) * kExtentBytes;
  impl.mapped = table + impl.count * kExtentBytes;
  impl.fd = ::memfd_create("isoshard-tensors", MFD_CLOEXEC);
  if (impl.fd < 0) fail("creating a memfd");
  if (::ftruncate(impl.fd, static_cast<off_t>(impl.mapped)) != 0) fail("reserving");
  void* const address = ::mmap(nullptr, impl.mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, impl.fd, 0);
  if (address == MAP_FAILED) fail("mapping");
  impl.mapping = static_cast<std::byte*>(address);
  impl.extents = impl.mapping + table;
}

TensorPool::~TensorPool() = default;

std::byte* TensorPool::take(std::size_t bytes, pid_t owner) noexcept {
  const Impl& impl = *impl_;
  const std::size_t wanted = extents_of(bytes);
  if (wanted == 0 || wanted > impl.count) return nullptr;
  std::size_t run = 0;  // free extents before `end`
  for (std::size_t end = bytes < kLargeBytes ? impl.count / 2 : 0; end < impl.count;) {
    run = impl.table()[end++].owner.load(std::memory_order_relaxed) == 0 ? run + 1 : 0;
    if (run < wanted) continue;
    const std::size_t first = end - wanted;
    if (!impl.claim(first, wanted, owner)) {  // another process was faster
      run = 0;
      end = first + 1;
      continue;
    }
    impl.raise_high_water(end);
    impl.table()[first].count.store(static_cast<std::uint32_t>(wanted), std::memory_order_release);
    std::byte* const data = impl.extents + first * kExtentBytes;
    // All pages in one go; and where memory is short, that is said here and not by a SIGBUS later.
    const std::size_t pages = (bytes + kPage - 1) / kPage * kPage;
    if (::madvise(data, pages, MADV_POPULATE_WRITE) == 0 || errno == EINVAL) return data;
    give_back(data);
    return nullptr;
  }
  return nullptr;
}

void TensorPool::give_back(const std::byte* data) noexcept {
  const auto first = static_cast<std::size_t>(data - impl_->extents) / kExtentBytes;
  const std::size_t count = impl_->table()[first].count.load(std::memory_order_acquire);
  for (std::size_t i = first + count; i-- > first;) impl_->table()[i].owner.store(0, std::memory_order_release);
}

pid_t TensorPool::owner_of(const std::byte* data) const noexcept {
  return impl_->table()[static_cast<std::size_t>(data - impl_->extents) / kExtentBytes].owner.load(std::memory_order_acquire);
}

bool TensorPool::holds(const void* data) const noexcept {
  return data >= impl_->extents && data < impl_->extents + impl_->count * kExtentBytes;
}

void TensorPool::reclaim(pid_t owner) noexcept {
  const std::size_t used = high_water() / kExtentBytes;
  for (std::size_t i = 0; i < used; ++i) {
    pid_t expected = owner;
    impl_->table()[i].owner.compare_exchange_strong(expected, 0, std::memory_order_acq_rel);
  }
}

void TensorPool::trim() noexcept {
  const std::size_t used = high_water() / kExtentBytes;
  const pid_t self = ::getpid();
  for (std::size_t i = 0; i < used; ++i) {
    if (!impl_->claim(i, 1, self)) continue;
    const auto offset = static_cast<off_t>(impl_->extents - impl_->mapping) + static_cast<off_t>(i * kExtentBytes);
    (void)::fallocate(impl_->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(kExtentBytes));
    impl_->table()[i].owner.store(0, std::memory_order_release);
  }
}

std::size_t TensorPool::high_water() const noexcept {
  return impl_->header().high_water.load(std::memory_order_relaxed) * kExtentBytes;
}

namespace {

std::unique_ptr<TensorPool>& program_pool() {
  static std::unique_ptr<TensorPool> pool;
  return pool;
}

c10::Allocator*& usual_allocator() {
  static c10::Allocator* usual = nullptr;
  return usual;
}

void release(void* context) {
  const auto* const data = static_cast<std::byte*>(context);
  TensorPool& pool = *program_pool();
  if (!pool.holds(data)) return usual_allocator()->raw_deleter()(context);
  // A forked process frees its tensors too; they are its parent's.
  if (pool.owner_of(data) == ::getpid()) pool.give_back(data);
}

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < TensorPool::kExtentBytes || owner_ != ::getpid()) return usual_allocator()->allocate(bytes);
    std::byte* const data = program_pool()->take(bytes, owner_);
    if (data == nullptr) return usual_allocator()->allocate(bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  pid_t owner_ = ::getpid();
};

}  // namespace

void make_tensor_pool() {
#if !defined(__SANITIZE_ADDRESS__)
  static bool was_tried = false;
  if (std::exchange(was_tried, true)) return;
  const std::size_t bytes = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  rlimit limit{};
  // A file that grows over this limit raises SIGXFSZ instead of failing.
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur / 2 < bytes) return;
  try {
    program_pool() = std::make_unique<TensorPool>(bytes);
  } catch (const Error&) {
    // Without it everything works as well, only slower.
  }
#endif
}

void use_tensor_pool() {
  if (program_pool() == nullptr) return;
  usual_allocator() = c10::GetCPUAllocator();
  static PoolAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
}

void reclaim_tensor_memory(pid_t gone) {
  TensorPool* const pool = program_pool().get();
  if (pool == nullptr || pool->high_water() == 0) return;
  pool->reclaim(gone);
  constexpr std::int64_t kScarce = 4;  // a quarter of the memory
  const Machine machine = this_machine();
  if (machine.available_bytes < machine.memory_bytes / kScarce) pool->trim();
}

}  // namespace isoshard
