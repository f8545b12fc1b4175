// SPDX-License-Identifier: Apache-2.0
// open, fstat, then read or map.
#include "core/base/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "core/system/input_guard.h"

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

constexpr std::size_t kReadWhole = std::size_t{1} << 20;

struct Identity {
  dev_t device = 0;
  ino_t inode = 0;
  off_t size = 0;
  timespec modified{};
};

Identity identity_of(const struct stat& status) noexcept {
  return {status.st_dev, status.st_ino, status.st_size, status.st_mtim};
}

/// Why it is not what it was; empty if it is.
std::string change_in_words(const Identity& before, const Identity& after) {
  if (before.size != after.size)
    return fmt::format("it had {} bytes, now it has {}", before.size, after.size);
  if (before.modified.tv_sec != after.modified.tv_sec ||
      before.modified.tv_nsec != after.modified.tv_nsec)
    return "another program wrote to it";
  return {};
}

std::string changed(const std::filesystem::path& path, const std::string& how) {
  return fmt::format("{}: changed while reading: {}; run again when no other program writes to it",
                     path.string(), how);
}

/// A copy in memory of its own, which no other program can change.
const std::byte* read_whole(const std::filesystem::path& path, int fd, const struct stat& status) {
  const auto size = static_cast<std::size_t>(status.st_size);
  void* const address =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED)
    throw FileError(fmt::format("{}: there is no memory for its {} bytes: {}", path.string(), size,
                                reason(errno)));
  auto* const data = static_cast<std::byte*>(address);
  const auto refuse = [&](const std::string& why) {
    ::munmap(address, size);
    throw FileError(why);
  };
  for (std::size_t done = 0; done < size;) {
    const ssize_t count = ::pread(fd, data + done, size - done, static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) refuse(fmt::format("{}: cannot be read: {}", path.string(), reason(errno)));
    if (count == 0)
      refuse(changed(path, fmt::format("it had {} bytes, now it has {}", size, done)));
    done += static_cast<std::size_t>(count);
  }
  struct stat after {};
  if (::fstat(fd, &after) == 0) {
    const std::string how = change_in_words(identity_of(status), identity_of(after));
    if (!how.empty()) refuse(changed(path, how));
  }
  (void)::mprotect(address, size, PROT_READ);
  return data;
}

}  // namespace

/// A mapped file that is open, in the list of all.
struct MappedFile::Watched {
  Watched(std::filesystem::path name, Identity opened_as, int guarded_range)
      : path(std::move(name)), identity(opened_as), range(guarded_range) {
    const std::lock_guard lock(mutex());
    open_files().insert(this);
  }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  ~Watched() {
    const std::lock_guard lock(mutex());
    open_files().erase(this);
    try {
      if (std::string problem = this->problem();
          !problem.empty() && !is_told && told_later().empty())
        told_later() = std::move(problem);
    } catch (const std::bad_alloc&) {  // the next opening of the file has to find it
    }
    detail::unguard_range(range);
  }

  [[nodiscard]] std::string problem() const {
    struct stat now {};
    std::string how;
    // A file that was replaced is another one: this one cannot be looked at any more.
    if (::stat(path.c_str(), &now) == 0 && now.st_dev == identity.device &&
        now.st_ino == identity.inode)
      how = change_in_words(identity, identity_of(now));
    if (how.empty() && detail::is_lost(range)) how = "it was shortened";
    return how.empty() ? how : changed(path, how);
  }

  static std::mutex& mutex() {
    static auto* const instance = new std::mutex;  // files may be closed at the program's end
    return *instance;
  }
  static std::set<const Watched*>& open_files() {
    static auto* const instance = new std::set<const Watched*>;
    return *instance;
  }
  /// The problem of a file that is closed by now.
  static std::string& told_later() {
    static auto* const instance = new std::string;
    return *instance;
  }
  static std::string any_problem() {
    const std::lock_guard lock(mutex());
    if (!told_later().empty()) return std::exchange(told_later(), {});
    for (const Watched* file : open_files()) {
      if (std::string problem = file->problem(); !problem.empty()) {
        file->is_told = true;
        return problem;
      }
    }
    return {};
  }

  std::filesystem::path path;
  Identity identity;
  int range;
  mutable bool is_told = false;  ///< under the mutex
};

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
  if (size > kReadWhole) {
    void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor.get(), 0);
    if (address == MAP_FAILED)
      throw FileError(
          fmt::format("{}: its {} bytes cannot be mapped: {}", path.string(), size, reason(errno)));
    const auto* const data = static_cast<const std::byte*>(address);
    const int range = detail::guard_range(data, size);
    if (range >= 0) {
      watched_ = std::make_unique<Watched>(path, identity_of(status), range);
      data_ = data;
      size_ = size;
      return;
    }
    ::munmap(address, size);  // more files are open than can be guarded
  }
  data_ = read_whole(path, descriptor.get(), status);
  size_ = size;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      watched_(std::move(other.watched_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(watched_, other.watched_);
  return *this;
}

MappedFile::~MappedFile() {
  watched_.reset();
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

std::string MappedFile::problem_of_any() {
  return Watched::any_problem();
}

void require_unchanged_inputs() {
  if (const std::string problem = MappedFile::problem_of_any(); !problem.empty())
    throw FileError(problem);
}

}  // namespace isoshard
