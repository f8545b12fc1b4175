// SPDX-License-Identifier: Apache-2.0
/// A growing region in a memfd: one header page with the size, then the data.
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/error.h"
#include "harness/trace/trace.h"

namespace isoshard {
namespace {

// EBUSY: there is a writable mapping. One of a rank that has not ended stays; one of a rank that has ended may stay for a moment, as
// whoever reads that process's entries in /proc (ps, the search for leaked processes of a run beside) holds its memory until it is done.
// Nothing tells when: so it is asked again for a while.
bool add_seals(int fd) {
  constexpr int kTries = 500, kPauseMs = 2;
  for (int i = 0; i < kTries; ++i) {
    if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) == 0) return true;
    if (errno != EBUSY) return false;
    (void)::poll(nullptr, 0, kPauseMs);
  }
  errno = EBUSY;
  return false;
}

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHeaderBytes = kPage;
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kGrowth = std::size_t{1} << 20;

struct Header {
  std::atomic<std::uint64_t> size{0};
  std::atomic<std::uint64_t> committed{0};  ///< bytes for which memory has been obtained
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared between processes");

std::size_t round_up(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

}  // namespace

struct Arena::Impl {
  int fd = -1;
  std::string name;
  std::size_t capacity = 0;
  std::byte* mapping = nullptr;
  std::size_t mapped = 0;
  bool sealed = false;

  [[nodiscard]] Header* header() const noexcept { return reinterpret_cast<Header*>(mapping); }
  [[noreturn]] void fail(std::string_view what, std::size_t bytes) const {
    throw InfrastructureError(fmt::format("trace memory {}: {} of {} bytes failed: {}", name, what, bytes, std::strerror(errno)));
  }
  void map(int protection, int flags, std::size_t bytes) {
    void* address = ::mmap(nullptr, bytes, protection, flags, fd, 0);
    if (address == MAP_FAILED) fail("mapping", bytes);
    mapping = static_cast<std::byte*>(address);
    mapped = bytes;
  }
  ~Impl() {
    if (mapping != nullptr) ::munmap(mapping, mapped);
    if (fd >= 0) ::close(fd);
  }
};

Arena::Arena(std::size_t capacity, const std::string& name) : impl_(std::make_unique<Impl>()) {
  impl_->name = name;
  impl_->capacity = round_up(capacity, kAlignment);
  impl_->fd = ::memfd_create(fmt::format("isoshard-{}", name).substr(0, 200).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const std::size_t bytes = kHeaderBytes + impl_->capacity;
  if (impl_->fd < 0) impl_->fail("creating a memfd", bytes);
  if (::ftruncate(impl_->fd, static_cast<off_t>(bytes)) != 0) impl_->fail("reserving", bytes);
  impl_->map(PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, bytes);
  new (impl_->mapping) Header;
}

Arena::~Arena() = default;

std::int64_t Arena::append(std::span<const std::byte> bytes) {
  Impl& impl = *impl_;
  if (impl.sealed) throw InfrastructureError(fmt::format("trace memory {} is sealed: nothing can be appended", impl.name));
  Header& header = *impl.header();
  const std::size_t offset = round_up(header.size.load(std::memory_order_relaxed), kAlignment);
  if (bytes.size() > impl.capacity || offset > impl.capacity - bytes.size()) {
    throw InfrastructureError(
        fmt::format("trace memory {} is full: {} bytes of {} are used, {} more are needed; record less or give it more room", impl.name,
                    offset, impl.capacity, bytes.size()));
  }
  const std::size_t end = offset + bytes.size();
  const std::size_t committed = header.committed.load(std::memory_order_relaxed);
  if (end > committed) {
    // Obtain the pages now: a write into a sparse file that cannot grow would be a SIGBUS instead of an error.
    const std::size_t target = std::min(impl.capacity, std::max(end, committed + kGrowth));
    int result = 0;
    do {
      result = ::fallocate(impl.fd, 0, static_cast<off_t>(kHeaderBytes + committed), static_cast<off_t>(target - committed));
    } while (result != 0 && errno == EINTR);
    if (result != 0) impl.fail("obtaining memory", target - committed);
    // And map them in one go rather than with a fault each; where the kernel cannot, they come one by one.
    const std::size_t page_begin = (kHeaderBytes + committed) / kPage * kPage;
    (void)::madvise(impl.mapping + page_begin, kHeaderBytes + target - page_begin, MADV_POPULATE_WRITE);
    header.committed.store(target, std::memory_order_relaxed);
  }
  if (!bytes.empty()) std::memcpy(impl.mapping + kHeaderBytes + offset, bytes.data(), bytes.size());
  header.size.store(end, std::memory_order_release);
  return static_cast<std::int64_t>(offset);
}

const std::byte* Arena::data() const noexcept {
  return impl_->mapping + kHeaderBytes;
}

std::size_t Arena::size() const noexcept {
  return impl_->header()->size.load(std::memory_order_acquire);
}

void Arena::seal() {
  Impl& impl = *impl_;
  if (impl.sealed) return;
  const std::size_t bytes = kHeaderBytes + size();
  ::munmap(impl.mapping, impl.mapped);
  impl.mapping = nullptr;
  if (::ftruncate(impl.fd, static_cast<off_t>(bytes)) != 0) impl.fail("cutting the file to size", bytes);
  if (!add_seals(impl.fd)) {
    const int reason = errno;
    impl.map(PROT_READ, MAP_PRIVATE, bytes);
    errno = reason;
    impl.fail("sealing", bytes);
  }
  // Private, because kernels before 6.7 refuse any shared mapping of a sealed memfd; unwritten pages are shared all the same.
  impl.map(PROT_READ, MAP_PRIVATE, bytes);
  impl.sealed = true;
}

}  // namespace isoshard
