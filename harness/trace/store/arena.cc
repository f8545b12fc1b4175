// SPDX-License-Identifier: Apache-2.0
// A reserved range of addresses, in which extents of the memory pool appear one after the other.
//
// What the processes have in common, a table in shared memory, says which extents; each process
// maps those that it lacks when it asks for the data. A reader maps them read-only. Where processes
// did not fork each other, the table lies in the pool, and its first extent is the handle.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "core/memory/memory_pool.h"
#include "harness/trace/trace.h"

namespace isoshard {
namespace {

constexpr std::size_t kExtent = MemoryPool::kExtentBytes;
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kGrowth = std::size_t{1} << 20;

/// At the beginning of the table; the extents' numbers in the pool follow.
struct Header {
  std::atomic<std::uint64_t> size{0};         ///< bytes appended
  std::atomic<std::uint64_t> num_extents{0};  ///< that are in the table
  std::atomic<std::int64_t> holders{1};       ///< processes that have not let it go
  std::uint64_t table_bytes = 0;
  pid_t owner = 0;  ///< of its extents in the pool
  std::uint32_t magic = 0;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
                  std::atomic<std::int64_t>::is_always_lock_free,
              "shared between processes");
constexpr std::uint32_t kArenaMagic = 0x31415249;  // "IRA1"

std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

}  // namespace

struct Arena::Impl {
  std::string name;
  std::size_t capacity = 0;
  std::shared_ptr<MemoryPool> pool;
  pid_t owner = 0;
  pid_t maker = ::getpid();
  std::byte* table = nullptr;
  std::size_t table_bytes = 0;
  std::byte* range = nullptr;  // `capacity` bytes, as far as extents are mapped
  std::size_t num_mapped = 0;  // extents
  std::size_t populated = 0;   // bytes, by the writer
  bool sealed = false;
  bool is_common = false;
  // of common memory
  bool is_counted = false;  // among the holders
  std::uint32_t first_of_table = 0;

  [[nodiscard]] Header& header() const noexcept { return *reinterpret_cast<Header*>(table); }
  [[nodiscard]] std::uint32_t* extents() const noexcept {
    return reinterpret_cast<std::uint32_t*>(table + sizeof(Header));
  }
  [[nodiscard]] std::size_t reserved() const noexcept {
    return std::max(round_up(capacity, kExtent), kExtent);
  }
  [[noreturn]] void fail(std::string_view what, std::size_t bytes) const {
    throw InfrastructureError(fmt::format(
        "trace memory {}: {} of {} bytes failed: {}{}", name, what, bytes, std::strerror(errno),
        is_common ? "; /dev/shm must have room for what all ranks of this host keep" : ""));
  }
  [[noreturn]] void fail_as_no_arena(ArenaHandle handle) const {
    throw InfrastructureError(
        fmt::format("trace memory {}: extent {} of the host's memory must begin a trace memory; a "
                    "process wrote where it must not",
                    name, handle.extent));
  }
  [[nodiscard]] std::byte* reserve(std::size_t bytes, int protection, int flags) const {
    void* const address =
        ::mmap(nullptr, bytes, protection, flags | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) fail("reserving", bytes);
    return static_cast<std::byte*>(address);
  }

  // Extents [from, to) of the table, those that lie together in the pool at once.
  void map(std::size_t from, std::size_t to, int protection) const {
    for (std::size_t end = from; from < to; from = end) {
      while (++end < to && extents()[end] == extents()[end - 1] + 1) {
      }
      if (!pool->map_at(range + from * kExtent, extents()[from], end - from, protection))
        fail("mapping", (end - from) * kExtent);
    }
  }
  void map_new(int protection) {
    const std::size_t num_extents = header().num_extents.load(std::memory_order_acquire);
    if (num_mapped >= num_extents) return;
    map(num_mapped, num_extents, protection);
    num_mapped = num_extents;
  }

  // Room for `end` bytes.
  void grow_to(std::size_t end) {
    const std::size_t num_extents = header().num_extents.load(std::memory_order_relaxed);
    if (const std::size_t wanted = round_up(end, kExtent) / kExtent; wanted > num_extents) {
      const std::vector<std::uint32_t> more = pool->take_scattered(wanted - num_extents, owner);
      std::copy(more.begin(), more.end(), extents() + num_extents);
      header().num_extents.store(num_extents + more.size(), std::memory_order_release);
      errno = ENOMEM;
      if (more.size() < wanted - num_extents) fail("obtaining memory", end);
    }
    map_new(PROT_READ | PROT_WRITE);
    const std::size_t target =
        std::min(num_mapped * kExtent, round_up(std::max(end, populated + kGrowth), kPage));
    if (!populate(range + populated, target - populated))
      fail("obtaining memory", target - populated);
    populated = target;
  }

  ~Impl() {
    if (range != nullptr) ::munmap(range, reserved());
    // A forked process has this object, too.
    const bool is_last =
        pool != nullptr && owner != 0 && maker == ::getpid() &&
        (!is_counted || header().holders.fetch_sub(1, std::memory_order_acq_rel) == 1);
    if (table != nullptr) ::munmap(table, table_bytes);
    if (is_last) pool->reclaim(owner);
  }

  // A second address, which sealing leaves writable: processes count themselves there.
  void map_table(std::uint32_t first, std::size_t bytes) {
    first_of_table = first;
    table_bytes = round_up(bytes, kExtent);
    table = reserve(table_bytes, PROT_NONE, MAP_PRIVATE);
    if (!pool->map_at(table, first, table_bytes / kExtent, PROT_READ | PROT_WRITE))
      fail("mapping the table", table_bytes);
  }
};

Arena::Arena(std::size_t capacity, const std::string& name) : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.name = name;
  impl.capacity = round_up(capacity, kAlignment);
  impl.pool = program_pool();
  if (impl.pool == nullptr) impl.pool = std::make_shared<MemoryPool>(impl.reserved());
  impl.owner = impl.pool->new_owner();
  impl.table_bytes = sizeof(Header) + impl.reserved() / kExtent * sizeof(std::uint32_t);
  impl.table = impl.reserve(impl.table_bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
  impl.range = impl.reserve(impl.reserved(), PROT_NONE, MAP_PRIVATE);
  new (impl.table) Header;
}

Arena::Arena(std::shared_ptr<MemoryPool> common, std::size_t capacity, const std::string& name)
    : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.name = name;
  impl.pool = std::move(common);
  impl.is_common = true;
  impl.capacity =
      round_up(std::min(capacity, impl.pool->num_extents() * kExtent - kAlignment), kAlignment);
  impl.owner = impl.pool->new_owner();
  const std::size_t bytes = sizeof(Header) + impl.reserved() / kExtent * sizeof(std::uint32_t);
  errno = ENOMEM;
  const std::byte* const table = impl.pool->take(bytes, impl.owner);
  if (table == nullptr) impl.fail("obtaining memory", bytes);
  impl.map_table(impl.pool->extent_of(table), bytes);
  impl.range = impl.reserve(impl.reserved(), PROT_NONE, MAP_PRIVATE);
  Header& header = *new (impl.table) Header;
  header.table_bytes = bytes;
  header.owner = impl.owner;
  header.magic = kArenaMagic;
  impl.is_counted = true;
}

Arena::Arena(std::shared_ptr<MemoryPool> common, ArenaHandle handle, const std::string& name)
    : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.name = name;
  impl.pool = std::move(common);
  impl.is_common = true;
  if (handle.extent >= impl.pool->num_extents()) impl.fail_as_no_arena(handle);
  const auto first = static_cast<std::uint32_t>(handle.extent);
  impl.map_table(first, kExtent);
  const std::uint64_t table_bytes = impl.header().table_bytes;
  const pid_t owner = impl.header().owner;
  if (impl.header().magic != kArenaMagic || impl.pool->owner_of(first) != owner)
    impl.fail_as_no_arena(handle);
  ::munmap(std::exchange(impl.table, nullptr), impl.table_bytes);
  impl.map_table(first, table_bytes);
  impl.owner = owner;
  impl.is_counted = true;
  impl.capacity = impl.header().num_extents.load(std::memory_order_acquire) * kExtent;
  impl.range = impl.reserve(impl.reserved(), PROT_NONE, MAP_PRIVATE);
  seal();
}

Arena::Arena(std::span<const std::filesystem::path> files, std::vector<std::int64_t>& begins)
    : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.name = "files";
  std::vector<std::size_t> sizes;
  begins.clear();
  for (const std::filesystem::path& file : files) {
    std::error_code error;
    sizes.push_back(std::filesystem::file_size(file, error));
    if (error) throw FileError(fmt::format("{}: {}", file.string(), error.message()));
    begins.push_back(static_cast<std::int64_t>(impl.capacity));
    impl.capacity += round_up(sizes.back(), kPage);
  }
  impl.table_bytes = sizeof(Header);
  impl.table = impl.reserve(impl.table_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE);
  impl.range = impl.reserve(impl.reserved(), PROT_NONE, MAP_PRIVATE);
  new (impl.table) Header;
  impl.header().size.store(impl.capacity, std::memory_order_release);
  impl.sealed = true;
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (sizes[i] == 0) continue;
    const int file = ::open(files[i].c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw FileError(fmt::format("{}: {}", files[i].string(), std::strerror(errno)));
    void* const at =
        ::mmap(impl.range + begins[i], sizes[i], PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0);
    ::close(file);
    if (at == MAP_FAILED) impl.fail("mapping", sizes[i]);
  }
}

Arena::~Arena() = default;

std::int64_t Arena::append(std::span<const std::byte> bytes) {
  Impl& impl = *impl_;
  if (impl.sealed)
    throw InfrastructureError(
        fmt::format("trace memory {} is sealed: nothing can be appended", impl.name));
  Header& header = impl.header();
  const std::size_t offset = round_up(header.size.load(std::memory_order_relaxed), kAlignment);
  if (bytes.size() > impl.capacity || offset > impl.capacity - bytes.size()) {
    throw InfrastructureError(
        fmt::format("trace memory {} is full: {} bytes of {} are used, {} more are needed; record "
                    "less or give it more room",
                    impl.name, offset, impl.capacity, bytes.size()));
  }
  const std::size_t end = offset + bytes.size();
  if (end > impl.populated) impl.grow_to(end);
  if (!bytes.empty()) std::memcpy(impl.range + offset, bytes.data(), bytes.size());
  header.size.store(end, std::memory_order_release);
  return static_cast<std::int64_t>(offset);
}

const std::byte* Arena::data() const noexcept {
  return impl_->range;
}

std::size_t Arena::size() const noexcept {
  return impl_->header().size.load(std::memory_order_acquire);
}

void Arena::seal() {
  Impl& impl = *impl_;
  if (impl.sealed) return;
  const std::size_t num_extents = impl.header().num_extents.load(std::memory_order_acquire);
  const auto is_own = [&](std::uint32_t extent) {
    return impl.pool->owner_of(extent) == impl.owner;
  };
  if (num_extents > impl.reserved() / kExtent || size() > num_extents * kExtent ||
      !std::all_of(impl.extents(), impl.extents() + num_extents, is_own)) {
    throw InfrastructureError(fmt::format(
        "trace memory {} is damaged: {} bytes in {} extents; a rank wrote where it must not",
        impl.name, size(), num_extents));
  }
  impl.map(0, num_extents, PROT_READ);
  impl.pool->protect(impl.owner);
  impl.sealed = true;
}

ArenaHandle Arena::share(int num_processes) {
  Impl& impl = *impl_;
  if (!impl.sealed || impl.header().magic != kArenaMagic) {
    throw UsageError(fmt::format(
        "trace memory {} must be sealed and lie in common memory to be shared", impl.name));
  }
  impl.header().holders.store(num_processes, std::memory_order_release);
  return {impl.first_of_table};
}

}  // namespace isoshard
