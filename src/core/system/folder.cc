// SPDX-License-Identifier: Apache-2.0
// openat, part by part.
#include "core/system/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <utility>

namespace isoshard {
namespace {

namespace fs = std::filesystem;

struct Anchor {
  fs::path path;
  int fd;
};

std::mutex& anchors_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::vector<Anchor>& anchors() {
  static std::vector<Anchor> instance;
  return instance;
}

// Absolute, without . and .. and without a slash at the end.
fs::path normal(const fs::path& path) {
  fs::path result = fs::absolute(path).lexically_normal();
  return result.has_filename() || result == result.root_path() ? result : result.parent_path();
}

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// The parts of `path` behind `front`; false if it is not at or below it.
bool parts_behind(const fs::path& front, const fs::path& path, std::vector<std::string>& parts) {
  auto part = path.begin();
  for (const fs::path& expected : front) {
    if (part == path.end() || *part != expected) return false;
    ++part;
  }
  for (; part != path.end(); ++part) parts.push_back(part->string());
  return true;
}

// A new descriptor; -1: no anchor is above.
int open_below_anchor(const fs::path& path, bool makes) {
  const std::lock_guard lock(anchors_mutex());
  const fs::path target = normal(path);
  const Anchor* best = nullptr;
  std::vector<std::string> way;
  for (const Anchor& anchor : anchors()) {
    std::vector<std::string> parts;
    if (!parts_behind(anchor.path, target, parts)) continue;
    if (best != nullptr && parts.size() >= way.size()) continue;
    best = &anchor;
    way = std::move(parts);
  }
  if (best == nullptr) return -1;
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  int fd = ::openat(best->fd, ".", kFlags);
  if (fd < 0) fail(errno, path.string());
  for (const std::string& part : way) {
    if (makes && ::mkdirat(fd, part.c_str(), 0777) != 0 && errno != EEXIST) {
      const int error = errno;
      ::close(fd);
      fail(error, path.string());
    }
    const int next = ::openat(fd, part.c_str(), kFlags);
    const int error = errno;
    ::close(fd);
    if (next < 0) fail(error, path.string());
    fd = next;
  }
  return fd;
}

fs::file_type type_of_mode(mode_t mode) noexcept {
  switch (mode & S_IFMT) {
    case S_IFREG:
      return fs::file_type::regular;
    case S_IFDIR:
      return fs::file_type::directory;
    case S_IFLNK:
      return fs::file_type::symlink;
    case S_IFIFO:
      return fs::file_type::fifo;
    case S_IFSOCK:
      return fs::file_type::socket;
    case S_IFCHR:
      return fs::file_type::character;
    case S_IFBLK:
      return fs::file_type::block;
    default:
      return fs::file_type::unknown;
  }
}

std::vector<std::string> names_at(int folder_fd) {
  const int fd = ::openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const folder = fd >= 0 ? ::fdopendir(fd) : nullptr;
  if (folder == nullptr) {
    const int error = errno;
    if (fd >= 0) ::close(fd);
    fail(error, "reading a folder");
  }
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(folder)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  ::closedir(folder);
  std::sort(names.begin(), names.end());
  return names;
}

void remove_file_at(int folder_fd, const std::string& name) {
  if (::unlinkat(folder_fd, name.c_str(), 0) != 0 && errno != ENOENT) fail(errno, name);
}

void remove_tree_at(int folder_fd, const std::string& name) {
  const int fd = ::openat(folder_fd, name.c_str(),
                          O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) {
    if (errno == ENOENT) return;
    if (errno != ENOTDIR && errno != ELOOP) fail(errno, name);
    return remove_file_at(folder_fd, name);
  }
  try {
    for (const std::string& inner : names_at(fd)) remove_tree_at(fd, inner);
  } catch (...) {
    ::close(fd);
    throw;
  }
  ::close(fd);
  if (::unlinkat(folder_fd, name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) fail(errno, name);
}

}  // namespace

Folder Folder::open(const fs::path& path) {
  const fs::path there = path.empty() ? fs::path(".") : path;
  if (const int fd = open_below_anchor(there, /*makes=*/false); fd >= 0) return Folder(fd);
  const int fd = ::open(there.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail(errno, there.string());
  return Folder(fd);
}

Folder Folder::make(const fs::path& path) {
  const fs::path there = path.empty() ? fs::path(".") : path;
  if (const int fd = open_below_anchor(there, /*makes=*/true); fd >= 0) return Folder(fd);
  fs::create_directories(there);
  const int fd = ::open(there.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) fail(errno, there.string());
  return Folder(fd);
}

Folder::Folder(Folder&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Folder& Folder::operator=(Folder&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Folder::~Folder() {
  if (fd_ >= 0) ::close(fd_);
}

std::vector<std::string> Folder::names() const {
  return names_at(fd_);
}

fs::file_type Folder::type_of(const std::string& name) const {
  struct stat status {};
  if (::fstatat(fd_, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0)
    return type_of_mode(status.st_mode);
  if (errno != ENOENT) fail(errno, name);
  return fs::file_type::not_found;
}

void Folder::remove_file(const std::string& name) const {
  remove_file_at(fd_, name);
}

void Folder::remove_tree(const std::string& name) const {
  remove_tree_at(fd_, name);
}

AnchoredFolder::AnchoredFolder(const fs::path& path, int fd) : path_(normal(path)) {
  const std::lock_guard lock(anchors_mutex());
  anchors().push_back({path_, fd});
}

AnchoredFolder::~AnchoredFolder() {
  const std::lock_guard lock(anchors_mutex());
  const auto own = std::find_if(anchors().rbegin(), anchors().rend(),
                                [&](const Anchor& anchor) { return anchor.path == path_; });
  if (own != anchors().rend()) anchors().erase(std::next(own).base());
}

std::string in_words(fs::file_type type) {
  switch (type) {
    case fs::file_type::regular:
      return "a regular file";
    case fs::file_type::directory:
      return "a directory";
    case fs::file_type::symlink:
      return "a symbolic link";
    case fs::file_type::fifo:
      return "a FIFO";
    case fs::file_type::socket:
      return "a socket";
    case fs::file_type::character:
    case fs::file_type::block:
      return "a device";
    default:
      return "something else";
  }
}

}  // namespace isoshard
