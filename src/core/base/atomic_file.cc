// SPDX-License-Identifier: Apache-2.0
// Temporary file, fsync, rename, all in one open folder.
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
#include "core/system/leftovers.h"

namespace isoshard {
namespace {

std::string temporary_for(const std::string& name) {
  static std::atomic<unsigned> counter{0};
  return fmt::format("{}.tmp.{}.{}", name, maker_mark(), counter.fetch_add(1));
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path)
    : path_(std::move(path)), name_(path_.filename().string()) {
  try {
    folder_ = Folder::open(path_.parent_path());
    require_replaceable();
  } catch (const std::system_error& error) {
    fail("opening its folder", error.code().value());
  }
  sweep_temporary_files(folder_->fd(), name_ + ".tmp.");
  constexpr int kAttempts = 16;
  for (int attempt = 0; fd_ < 0 && attempt < kAttempts; ++attempt) {
    const std::string temporary = temporary_for(name_);
    fd_ = ::openat(folder_->fd(), temporary.c_str(),
                   O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd_ >= 0) temporary_ = temporary;
    if (fd_ < 0 && errno != EEXIST) break;
  }
  if (fd_ < 0) fail("creating a temporary file beside it", errno);
  hold(fd_);
}

AtomicFile::~AtomicFile() {
  discard();
}

// A rename would replace a device or a FIFO without a word, and nothing reads from there.
void AtomicFile::require_replaceable() const {
  const std::filesystem::file_type type = folder_->type_of(name_);
  using std::filesystem::file_type;
  if (type == file_type::not_found || type == file_type::regular || type == file_type::symlink)
    return;
  throw InfrastructureError(
      fmt::format("{}: is {}, not a regular file; name another file, or remove it", path_.string(),
                  in_words(type)));
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
  if (::renameat(folder_->fd(), temporary_.c_str(), folder_->fd(), name_.c_str()) != 0)
    fail("renaming the finished file into place", errno);
  temporary_.clear();
  // Makes the rename itself durable. File systems that cannot sync a directory are not a reason to
  // fail: the data are there.
  (void)::fsync(folder_->fd());
}

void AtomicFile::fail(std::string_view doing, int error) {
  discard();
  throw InfrastructureError(fmt::format("{}: {} failed after {} bytes: {}", path_.string(), doing,
                                        bytes_written_, std::generic_category().message(error)));
}

void AtomicFile::discard() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (!temporary_.empty()) ::unlinkat(folder_->fd(), temporary_.c_str(), 0);
  temporary_.clear();
}

void write_file_atomically(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace isoshard
