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
#include "core/system/leftovers.h"

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

bool is_same(const struct stat& a, const struct stat& b) noexcept {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

// Whether the file of this descriptor is still the one of that name.
bool is_file_at(int fd, int folder, const char* name) {
  struct stat own {
  }, there{};
  return ::fstat(fd, &own) == 0 && ::fstatat(folder, name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
         is_same(own, there);
}

// The files that commands write to such a folder have these names.
bool names_a_file_of_ours(std::string_view name) {
  if (name == "manifest.json" || name == "init_weights.safetensors" || name == "batch.safetensors")
    return true;
  return name.starts_with("report.") || (name.starts_with("loss_") && name.ends_with(".json"));
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
  try {
    open_and_lock(option);
  } catch (...) {
    let_go();
    throw;
  }
}

OutputFolder::~OutputFolder() {
  let_go();
}

void OutputFolder::open_and_lock(std::string_view option) {
  // from here on the folder itself counts, not its name
  descriptor_ = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (descriptor_ < 0)
    throw UsageError(
        fmt::format("{} {}: cannot be opened: {}", option, folder_.string(), std::strerror(errno)));
  require_writable(folder_, descriptor_, option);
  lock(option);
  anchor_ = std::make_unique<AnchoredFolder>(folder_, descriptor_);
  require_regular_files(option);
  sweep_temporary_files(descriptor_);
}

void OutputFolder::let_go() noexcept {
  if (owner_ != ::getpid()) {  // a copy in a rank
    (void)anchor_.release();
    return;
  }
  anchor_.reset();
  if (fd_ >= 0) {
    // while it is held, so that nobody takes a file that is about to go
    ::unlinkat(descriptor_, kLockName, 0);
    ::close(std::exchange(fd_, -1));
  }
  if (descriptor_ < 0) return;
  struct stat own {
  }, there{};
  const bool is_there = ::fstat(descriptor_, &own) == 0 && ::lstat(folder_.c_str(), &there) == 0 &&
                        is_same(own, there);
  if (made_ && is_there) ::rmdir(folder_.c_str());  // fails unless it is empty
  ::close(std::exchange(descriptor_, -1));
}

// What would be in the way of a report at the end of the run is told at its start.
void OutputFolder::require_regular_files(std::string_view option) const {
  const Folder folder = Folder::open(folder_);
  for (const std::string& name : folder.names()) {
    const std::filesystem::file_type type = folder.type_of(name);
    using std::filesystem::file_type;
    if (!names_a_file_of_ours(name) || type == file_type::regular || type == file_type::symlink ||
        type == file_type::not_found)
      continue;
    throw UsageError(fmt::format("{} {}: {} in it is {}, not a regular file; remove it", option,
                                 folder_.string(), printable(name), in_words(type)));
  }
}

void OutputFolder::lock(std::string_view option) {
  const std::filesystem::path path = folder_ / kLockName;
  for (;;) {
    fd_ = ::openat(descriptor_, kLockName, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK,
                   0666);
    if (fd_ < 0)
      throw UsageError(fmt::format("{} {}: its lock cannot be opened: {}", option, path.string(),
                                   std::strerror(errno)));
    struct stat status {};
    if (::fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) {
      ::close(std::exchange(fd_, -1));
      throw UsageError(
          fmt::format("{} {}: must be a regular file; remove it", option, path.string()));
    }
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) break;
    if (is_file_at(fd_, descriptor_, kLockName)) {
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

void require_writable(const std::filesystem::path& folder, int descriptor,
                      std::string_view option) {
  // access() would lie to root on a read-only file system, so try for real.
  const int probe = ::openat(descriptor, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
  if (probe >= 0) {
    ::close(probe);
  } else if (errno == EOPNOTSUPP || errno == EISDIR) {
    if (::faccessat(descriptor, ".", W_OK, 0) != 0)
      throw UsageError(
          fmt::format("{} {}: not writable: {}", option, folder.string(), std::strerror(errno)));
  } else {
    throw UsageError(
        fmt::format("{} {}: not writable: {}", option, folder.string(), std::strerror(errno)));
  }
}

void require_output_file(const std::filesystem::path& path, std::string_view option) {
  if (path.empty()) return;
  std::error_code error;
  const auto type = std::filesystem::status(path, error).type();
  using std::filesystem::file_type;
  if (type == file_type::regular || type == file_type::not_found || type == file_type::none) return;
  throw UsageError(fmt::format("{} {}: is {}, not a regular file; name another file", option,
                               path.string(), in_words(type)));
}

}  // namespace isoshard
