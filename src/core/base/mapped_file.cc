// SPDX-License-Identifier: Apache-2.0
// open, fstat, mmap.
#include "core/base/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/base/error.h"

namespace isoshard {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int get() const noexcept { return fd_; }

 private:
  int fd_;
};

std::string_view kind_of(mode_t mode) noexcept {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "something else";
}

std::string reason(int error) {
  return std::generic_category().message(error);
}

void require_regular(const std::filesystem::path& path, const struct stat& status) {
  if (!S_ISREG(status.st_mode)) {
    throw FileError(
        fmt::format("{}: is {}, not a regular file", path.string(), kind_of(status.st_mode)));
  }
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer. It has no effect on regular files.
  const Descriptor descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat status {};
  if (descriptor.get() < 0) {
    const int error = errno;
    // a socket cannot be opened at all
    if (::stat(path.c_str(), &status) == 0) require_regular(path, status);
    throw FileError(fmt::format("{}: cannot be opened: {}", path.string(), reason(error)));
  }
  if (::fstat(descriptor.get(), &status) != 0)
    throw FileError(fmt::format("{}: cannot be examined: {}", path.string(), reason(errno)));
  require_regular(path, status);
  if (status.st_size == 0) return;  // an empty file cannot be mapped; it has no bytes anyway
  const auto size = static_cast<std::size_t>(status.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
  if (address == MAP_FAILED)
    throw FileError(
        fmt::format("{}: its {} bytes cannot be mapped: {}", path.string(), size, reason(errno)));
  data_ = static_cast<const std::byte*>(address);
  size_ = size;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace isoshard
