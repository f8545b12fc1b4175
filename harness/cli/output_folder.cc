// SPDX-License-Identifier: Apache-2.0
/// Makes output folders, finds out early whether they can be written to, and keeps other runs out.
#include "harness/cli/output_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "core/base/printable.h"

namespace isoshard {
namespace {

constexpr const char* kLockName = ".isoshard.lock";

// The process that a lock file names; "?" while it is still being written.
std::string holder_in(int fd) {
  std::array<char, 32> text{};
  const ssize_t count = ::pread(fd, text.data(), text.size() - 1, 0);
  const std::string_view line =
      std::string_view(text.data(), count > 0 ? static_cast<std::size_t>(count) : 0);
  return line.empty() ? "?" : printable(line.substr(0, line.find('\n')));
}

// Whether the file of this descriptor is still the one of that name.
bool is_file_at(int fd, const std::filesystem::path& path) {
  struct stat own {
  }, there{};
  return ::fstat(fd, &own) == 0 && ::stat(path.c_str(), &there) == 0 &&
         own.st_dev == there.st_dev && own.st_ino == there.st_ino;
}

}  // namespace

OutputFolder::OutputFolder(std::filesystem::path folder, std::string_view option)
    : folder_(std::move(folder)), owner_(::getpid()) {
  if (folder_.empty()) return;
  std::error_code error;
  const auto status = std::filesystem::symlink_status(folder_, error);
  if (std::filesystem::is_symlink(status))
    throw UsageError(
        fmt::format("{} {}: is a symbolic link; name the folder itself", option, folder_.string()));
  if (std::filesystem::exists(status) && !std::filesystem::is_directory(status))
    throw UsageError(fmt::format("{} {}: exists and is not a folder", option, folder_.string()));
  made_ = std::filesystem::create_directories(folder_, error);
  if (error)
    throw UsageError(
        fmt::format("{} {}: cannot be made: {}", option, folder_.string(), error.message()));
  require_writable(option);
  lock(option);
}

OutputFolder::~OutputFolder() {
  if (owner_ != ::getpid()) return;  // a copy in a rank
  if (fd_ >= 0) {
    // while it is held, so that nobody takes a file that is about to go
    ::unlink((folder_ / kLockName).c_str());
    ::close(fd_);
  }
  if (made_) ::rmdir(folder_.c_str());  // fails unless it is empty
}

void OutputFolder::require_writable(std::string_view option) const {
  // access() would lie to root on a read-only file system, so try for real.
  const int probe = ::open(folder_.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
  if (probe >= 0) {
    ::close(probe);
  } else if (errno == EOPNOTSUPP || errno == EISDIR) {
    if (::access(folder_.c_str(), W_OK) != 0)
      throw UsageError(
          fmt::format("{} {}: not writable: {}", option, folder_.string(), std::strerror(errno)));
  } else {
    throw UsageError(
        fmt::format("{} {}: not writable: {}", option, folder_.string(), std::strerror(errno)));
  }
}

void OutputFolder::lock(std::string_view option) {
  const std::filesystem::path path = folder_ / kLockName;
  for (;;) {
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (fd_ < 0)
      throw UsageError(fmt::format("{} {}: its lock cannot be opened: {}", option, path.string(),
                                   std::strerror(errno)));
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) break;
    if (is_file_at(fd_, path)) {
      const std::string line = fmt::format("{}\n", owner_);
      (void)!::ftruncate(fd_, 0);
      // only told to others: a full disk is found where it matters
      (void)!::pwrite(fd_, line.data(), line.size(), 0);
      return;
    }
    ::close(fd_);  // its holder removed it meanwhile
  }
  const int error = errno;
  const std::string holder = holder_in(fd_);
  ::close(std::exchange(fd_, -1));
  // two options name one folder
  if (error == EWOULDBLOCK && holder == std::to_string(owner_)) return;
  made_ = false;
  if (error == EWOULDBLOCK)
    throw UsageError(fmt::format("{} {}: is in use by another run, process {} ({})", option,
                                 folder_.string(), holder, path.string()));
  throw UsageError(
      fmt::format("{} {}: cannot be locked: {}", option, path.string(), std::strerror(error)));
}

}  // namespace isoshard
