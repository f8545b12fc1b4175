// SPDX-License-Identifier: Apache-2.0
/// memfd, seals and reservation.
#include "core/comm/shm/shm_region.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/base/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace isoshard {
namespace {

[[noreturn]] void fail(const char* what, std::size_t bytes, int error) {
  throw InfrastructureError(fmt::format(
      "shared memory: {} of {} KiB failed: {}; free memory or raise the limit (ulimit -a, the "
      "container's memory limit)",
      what, bytes >> 10, std::strerror(error)));
}

// A file that grows over this limit raises SIGXFSZ instead of failing, so the limit is read first.
void check_file_size_limit(std::size_t capacity) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < capacity) {
    throw InfrastructureError(
        fmt::format("shared memory: the limit on file sizes (ulimit -f, RLIMIT_FSIZE) must be at "
                    "least {} KiB for this world, got {} KiB; raise it",
                    capacity >> 10, limit.rlim_cur >> 10));
  }
}

}  // namespace

ShmRegion::ShmRegion(std::size_t capacity) : capacity_(capacity) {
  check_file_size_limit(capacity);
  fd_ = memfd_create("isoshard-world", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd_ < 0) fail("memfd_create", capacity, errno);
  void* data = MAP_FAILED;
  const char* what = "ftruncate";
  if (ftruncate(fd_, static_cast<off_t>(capacity)) == 0) {
    what = "sealing";
    if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
      what = "mmap";
      data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    }
  }
  if (data == MAP_FAILED) {
    const int error = errno;
    close(fd_);
    fail(what, capacity, error);
  }
  data_ = static_cast<std::byte*>(data);
}

ShmRegion::~ShmRegion() {
  munmap(data_, capacity_);
  close(fd_);
}

RegionMemory ShmRegion::memory() {
  return {data_, capacity_,
          [this](std::size_t offset, std::size_t bytes) { reserve(offset, bytes); }};
}

// Populating makes the pages and maps them into this process, which is the one that will write
// them.
void ShmRegion::reserve(std::size_t offset, std::size_t bytes) {
  int error = 0;
  do {
    error = madvise(data_ + offset, bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == EINVAL) {  // a kernel before 5.14
    do {
      error = posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    } while (error == EINTR);
  }
  if (error != 0) fail("reserving", bytes, error == EFAULT ? ENOSPC : error);
}

}  // namespace isoshard
