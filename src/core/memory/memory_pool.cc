// SPDX-License-Identifier: Apache-2.0
// A table of owners beside one mapping.
#include "core/memory/memory_pool.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "core/base/error.h"

namespace isoshard {
namespace {

struct Extent {
  std::atomic<pid_t> owner{0};          // 0: free
  std::atomic<std::uint32_t> count{0};  // of the piece that begins here
};
static_assert(std::atomic<pid_t>::is_always_lock_free &&
                  std::atomic<std::uint32_t>::is_always_lock_free,
              "shared between processes");

constexpr std::size_t kPage = 4096;

std::size_t extents_of(std::size_t bytes) {
  return (bytes + MemoryPool::kExtentBytes - 1) / MemoryPool::kExtentBytes;
}

}  // namespace

struct MemoryPool::Impl {
  std::size_t count = 0;  // extents
  int fd = -1;
  std::byte* mapping = nullptr;  // owners, then extents
  std::byte* extents = nullptr;
  std::size_t mapped = 0;
  // Of this process: extents that it can only read.
  std::mutex mutex;
  std::vector<bool> is_protected;
  std::atomic<std::size_t> num_protected{0};

  struct Header {
    std::atomic<std::size_t> high_water{0};  // one above the highest extent that was ever taken
    // of owners that are not processes, whose ids are negative
    std::atomic<pid_t> last_owner{0};
  };
  [[nodiscard]] Header& header() const noexcept { return *reinterpret_cast<Header*>(mapping); }
  [[nodiscard]] Extent* table() const noexcept {
    return reinterpret_cast<Extent*>(mapping + sizeof(Header));
  }

  // Owns [first, first + wanted), or nothing and false.
  bool claim(std::size_t first, std::size_t wanted, pid_t owner) const noexcept {
    for (std::size_t i = first; i < first + wanted; ++i) {
      pid_t free = 0;
      if (table()[i].owner.compare_exchange_strong(free, owner, std::memory_order_acq_rel))
        continue;
      while (i-- > first) table()[i].owner.store(0, std::memory_order_release);
      return false;
    }
    return true;
  }

  // This process is about to write there.
  void unprotect(std::size_t first, std::size_t end) noexcept {
    if (num_protected == 0) return;
    const std::lock_guard lock(mutex);
    for (std::size_t i = first; i < end; ++i) {
      if (!is_protected[i]) continue;
      is_protected[i] = false;
      --num_protected;
      (void)::mprotect(extents + i * kExtentBytes, kExtentBytes, PROT_READ | PROT_WRITE);
    }
  }

  void raise_high_water(std::size_t end) const noexcept {
    std::size_t seen = header().high_water.load(std::memory_order_relaxed);
    while (seen < end &&
           !header().high_water.compare_exchange_weak(seen, end, std::memory_order_relaxed)) {
    }
  }

  ~Impl() {
    if (mapping != nullptr) ::munmap(mapping, mapped);
    if (fd >= 0) ::close(fd);
  }
};

namespace {

[[noreturn]] void fail(std::string_view what) {
  throw InfrastructureError(
      fmt::format("memory of worlds: {} failed: {}", what, std::strerror(errno)));
}

int new_file() {
  const int fd = ::memfd_create("isoshard-pool", MFD_CLOEXEC);
  if (fd < 0) fail("creating a memfd");
  return fd;
}

}  // namespace

std::size_t MemoryPool::file_bytes(std::size_t bytes) noexcept {
  const std::size_t count = bytes / kExtentBytes;
  return (extents_of(sizeof(Impl::Header) + count * sizeof(Extent)) + count) * kExtentBytes;
}

MemoryPool::MemoryPool(std::size_t bytes) : MemoryPool(new_file(), bytes) {}

MemoryPool::MemoryPool(int fd, std::size_t bytes) : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.fd = fd;
  impl.count = bytes / kExtentBytes;
  impl.mapped = file_bytes(bytes);
  rlimit limit{};
  // or SIGXFSZ would end the process
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < impl.mapped) {
    throw InfrastructureError(
        fmt::format("memory of worlds: the limit on file sizes (ulimit -f) must be at least {} "
                    "bytes, got {}; raise it",
                    impl.mapped, limit.rlim_cur));
  }
  struct stat file {};
  if (::fstat(fd, &file) != 0) fail("looking at a file");
  if (file.st_size < static_cast<off_t>(impl.mapped) &&
      ::ftruncate(fd, static_cast<off_t>(impl.mapped)) != 0)
    fail("reserving");
  // now, as a first touch that finds no space would be a SIGBUS
  if (const std::size_t table = sizeof(Impl::Header) + impl.count * sizeof(Extent);
      ::fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(table)) != 0 &&
      errno != EOPNOTSUPP)
    fail("obtaining the table of owners");
  void* const address =
      ::mmap(nullptr, impl.mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (address == MAP_FAILED) fail("mapping");
  impl.mapping = static_cast<std::byte*>(address);
  impl.extents = impl.mapping + (impl.mapped - impl.count * kExtentBytes);
}

MemoryPool::~MemoryPool() = default;

std::byte* MemoryPool::take(std::size_t bytes, pid_t owner) noexcept {
  Impl& impl = *impl_;
  const std::size_t wanted = extents_of(bytes);
  if (wanted == 0 || wanted > impl.count) return nullptr;
  std::size_t run = 0;  // free extents before `end`
  for (std::size_t end = 0; end < impl.count;) {
    run = impl.table()[end++].owner.load(std::memory_order_relaxed) == 0 ? run + 1 : 0;
    if (run < wanted) continue;
    const std::size_t first = end - wanted;
    // before: a process that ends here must be found by reclaim()
    impl.raise_high_water(end);
    if (!impl.claim(first, wanted, owner)) {  // another process was faster
      run = 0;
      end = first + 1;
      continue;
    }
    impl.unprotect(first, end);
    impl.table()[first].count.store(static_cast<std::uint32_t>(wanted), std::memory_order_release);
    std::byte* const data = impl.extents + first * kExtentBytes;
    if (populate(data, bytes)) return data;
    give_back(data);
    return nullptr;
  }
  return nullptr;
}

void MemoryPool::give_back(const std::byte* data) noexcept {
  const auto first = static_cast<std::size_t>(data - impl_->extents) / kExtentBytes;
  const std::size_t count = impl_->table()[first].count.load(std::memory_order_acquire);
  for (std::size_t i = first + count; i-- > first;)
    impl_->table()[i].owner.store(0, std::memory_order_release);
}

std::vector<std::uint32_t> MemoryPool::take_scattered(std::size_t count, pid_t owner) {
  const Impl& impl = *impl_;
  std::vector<std::uint32_t> taken;
  for (std::size_t i = 0; i < impl.count && taken.size() < count; ++i) {
    impl.raise_high_water(i + 1);
    if (impl.claim(i, 1, owner)) taken.push_back(static_cast<std::uint32_t>(i));
  }
  return taken;
}

bool MemoryPool::map_at(std::byte* address, std::uint32_t first, std::size_t count,
                        int protection) const noexcept {
  const auto offset =
      impl_->extents - impl_->mapping + static_cast<std::ptrdiff_t>(first * kExtentBytes);
  return ::mmap(address, count * kExtentBytes, protection, MAP_SHARED | MAP_NORESERVE | MAP_FIXED,
                impl_->fd, offset) != MAP_FAILED;
}

pid_t MemoryPool::new_owner() noexcept {
  return impl_->header().last_owner.fetch_sub(1, std::memory_order_relaxed) - 1;
}

pid_t MemoryPool::owner_of(const std::byte* data) const noexcept {
  return impl_->table()[static_cast<std::size_t>(data - impl_->extents) / kExtentBytes].owner.load(
      std::memory_order_acquire);
}

pid_t MemoryPool::owner_of(std::uint32_t extent) const noexcept {
  return extent < impl_->count ? impl_->table()[extent].owner.load(std::memory_order_acquire) : 0;
}

void MemoryPool::protect(pid_t owner) {
  Impl& impl = *impl_;
  const std::lock_guard lock(impl.mutex);
  impl.is_protected.resize(impl.count);
  for (std::uint32_t i = 0; i < impl.count; ++i) {
    if (owner_of(i) != owner) continue;
    impl.is_protected[i] = true;
    ++impl.num_protected;
    (void)::mprotect(impl.extents + i * kExtentBytes, kExtentBytes, PROT_READ);
  }
}

bool MemoryPool::holds(const void* data) const noexcept {
  return data >= impl_->extents && data < impl_->extents + impl_->count * kExtentBytes;
}

std::uint32_t MemoryPool::extent_of(const std::byte* data) const noexcept {
  return static_cast<std::uint32_t>(static_cast<std::size_t>(data - impl_->extents) / kExtentBytes);
}

std::size_t MemoryPool::num_extents() const noexcept {
  return impl_->count;
}

void MemoryPool::reclaim(pid_t owner) noexcept {
  const std::size_t used = high_water() / kExtentBytes;
  for (std::size_t i = 0; i < used; ++i) {
    if (impl_->table()[i].owner.load(std::memory_order_relaxed) != owner) continue;
    impl_->unprotect(i, i + 1);
    impl_->table()[i].owner.store(0, std::memory_order_release);
  }
}

void MemoryPool::trim() noexcept {
  const std::size_t used = high_water() / kExtentBytes;
  const pid_t self = ::getpid();
  for (std::size_t i = 0; i < used; ++i) {
    if (!impl_->claim(i, 1, self)) continue;
    const auto offset =
        static_cast<off_t>(impl_->extents - impl_->mapping) + static_cast<off_t>(i * kExtentBytes);
    (void)::fallocate(impl_->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset,
                      static_cast<off_t>(kExtentBytes));
    impl_->table()[i].owner.store(0, std::memory_order_release);
  }
}

std::size_t MemoryPool::high_water() const noexcept {
  return impl_->header().high_water.load(std::memory_order_relaxed) * kExtentBytes;
}

namespace {

std::shared_ptr<MemoryPool> make_program_pool() {
  const std::size_t bytes = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) *
                            static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  rlimit limit{};
  // A file that grows over this limit raises SIGXFSZ instead of failing.
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur / 2 < bytes) return nullptr;
  try {
    return std::make_shared<MemoryPool>(bytes);
  } catch (const Error&) {
    return nullptr;  // without it everything works as well, only slower
  }
}

}  // namespace

std::shared_ptr<MemoryPool> program_pool() {
  static const std::shared_ptr<MemoryPool> pool = make_program_pool();
  return pool;
}

// Reading, because that maps 16 pages at a time where the memory is there, and writable all the
// same.
bool populate(std::byte* data, std::size_t bytes) noexcept {
  const std::size_t pages = (bytes + kPage - 1) / kPage * kPage;
  if (::madvise(data, pages, MADV_POPULATE_READ) == 0 || errno == EINVAL) return true;
  if (errno == EFAULT) errno = ENOSPC;  // what a SIGBUS would have been about
  return false;
}

}  // namespace isoshard
