// SPDX-License-Identifier: Apache-2.0
// Temporary file, fsync, rename.
#include "core/base/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "core/base/error.h"

namespace isoshard {
namespace {

std::filesystem::path temporary_for(const std::filesystem::path& path) {
  static std::atomic<unsigned> counter{0};
  std::filesystem::path temporary = path;
  temporary += fmt::format(".tmp.{}.{}", ::getpid(), counter.fetch_add(1));
  return temporary;
}

/// Makes the rename itself durable. File systems that cannot sync a directory are not a reason to
/// fail: the data are there.
void sync_directory_of(const std::filesystem::path& path) noexcept {
  const std::filesystem::path parent = path.has_parent_path() ? path.parent_path() : ".";
  const int fd = ::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
  constexpr int kAttempts = 16;  // a crashed process of the same number may have left its file
  for (int attempt = 0; fd_ < 0 && attempt < kAttempts; ++attempt) {
    const std::filesystem::path temporary = temporary_for(path_);
    fd_ = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ >= 0) temporary_ = temporary;
    if (fd_ < 0 && errno != EEXIST) break;
  }
  if (fd_ < 0) fail("creating a temporary file beside it", errno);
}

AtomicFile::~AtomicFile() {
  discard();
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  if (fd_ < 0) fail("writing", EBADF);
  while (!bytes.empty()) {
    // Linux writes at most 2 GiB at once
    const std::size_t chunk = std::min<std::size_t>(bytes.size(), std::size_t{1} << 30);
    const ssize_t written = ::write(fd_, bytes.data(), chunk);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0)
      fail(fmt::format("writing {} more", bytes.size()), written < 0 ? errno : ENOSPC);
    bytes_written_ += static_cast<std::uint64_t>(written);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void AtomicFile::commit() {
  if (fd_ < 0) fail("committing", EBADF);
  if (::fsync(fd_) != 0) fail("flushing", errno);
  if (::close(std::exchange(fd_, -1)) != 0) fail("closing", errno);
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0)
    fail("renaming the finished file into place", errno);
  temporary_.clear();
  sync_directory_of(path_);
}

void AtomicFile::fail(std::string_view doing, int error) {
  discard();
  throw InfrastructureError(fmt::format("{}: {} failed after {} bytes: {}", path_.string(), doing,
                                        bytes_written_, std::generic_category().message(error)));
}

void AtomicFile::discard() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  temporary_.clear();
}

void write_file_atomically(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace isoshard
