// SPDX-License-Identifier: Apache-2.0
// Names, /proc and flock.
#include "core/system/leftovers.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace isoshard {
namespace {

constexpr std::string_view kTemporary = ".tmp.";

// In clock ticks since the machine was started; none if there is no such process or no /proc.
std::optional<std::uint64_t> start_of(std::int64_t pid) {
  const std::string path = fmt::format("/proc/{}/stat", pid);
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  std::array<char, 1024> buffer{};
  const ssize_t count = ::read(fd, buffer.data(), buffer.size());
  ::close(fd);
  const std::string_view line(buffer.data(), count > 0 ? static_cast<std::size_t>(count) : 0);
  // the name, in brackets, may hold anything; the start is the 20th word behind it
  std::size_t at = line.rfind(')');
  constexpr int kWords = 20;
  for (int word = 0; word < kWords && at != std::string_view::npos; ++word)
    at = line.find(' ', at + 1);
  if (at == std::string_view::npos) return std::nullopt;
  std::uint64_t start = 0;
  const auto [end, error] = std::from_chars(line.data() + at + 1, line.data() + line.size(), start);
  return error == std::errc() ? std::optional(start) : std::nullopt;
}

template <class Number>
bool take_number(std::string_view& text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return true;
}

std::vector<std::string> names_in(int folder_fd) {
  std::vector<std::string> names;
  const int fd = ::openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const folder = fd >= 0 ? ::fdopendir(fd) : nullptr;
  if (folder == nullptr) {
    if (fd >= 0) ::close(fd);
    return names;
  }
  while (const dirent* entry = ::readdir(folder)) names.emplace_back(entry->d_name);
  ::closedir(folder);
  return names;
}

// "PID.START.N" or "PID.START-XXXXXX" begins with a mark.
std::string_view mark_in(std::string_view text) {
  const std::size_t first = text.find('.');
  if (first == std::string_view::npos) return {};
  return text.substr(0, text.find_first_of(".-", first + 1));
}

bool is_own(const struct stat& status, mode_t kind) {
  return (status.st_mode & S_IFMT) == kind && status.st_uid == ::geteuid();
}

}  // namespace

std::string maker_mark() {
  const auto pid = static_cast<std::int64_t>(::getpid());
  return fmt::format("{}.{}", pid, start_of(pid).value_or(0));
}

bool is_maker_gone(std::string_view mark) {
  std::int64_t pid = 0;
  std::uint64_t start = 0;
  if (!take_number(mark, pid) || !mark.starts_with('.')) return false;
  mark.remove_prefix(1);
  if (!take_number(mark, start) || !mark.empty() || pid <= 0) return false;
  const std::optional<std::uint64_t> running = start_of(pid);
  if (running.has_value()) return *running != start;
  return ::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
}

void hold(int fd) noexcept {
  (void)::flock(fd, LOCK_EX | LOCK_NB);
}

bool take_over(int fd) noexcept {
  return ::flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

void sweep_temporary_files(int folder_fd, std::string_view first_part) noexcept {
  try {
    for (const std::string& name : names_in(folder_fd)) {
      const std::size_t at = name.rfind(kTemporary);
      if (at == std::string::npos || !name.starts_with(first_part)) continue;
      if (!is_maker_gone(mark_in(std::string_view(name).substr(at + kTemporary.size())))) continue;
      const int fd =
          ::openat(folder_fd, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
      if (fd < 0) continue;
      struct stat status {};
      if (::fstat(fd, &status) == 0 && is_own(status, S_IFREG) && take_over(fd))
        ::unlinkat(folder_fd, name.c_str(), 0);
      ::close(fd);
    }
  } catch (const std::exception&) {  // no memory: the next run has it to do
  }
}

void sweep_folders(const std::filesystem::path& folder, std::string_view first) noexcept {
  const int folder_fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_fd < 0) return;
  try {
    for (const std::string& name : names_in(folder_fd)) {
      if (!name.starts_with(first) || name.size() <= first.size() || name[first.size()] != '-')
        continue;
      if (!is_maker_gone(mark_in(std::string_view(name).substr(first.size() + 1)))) continue;
      const int fd =
          ::openat(folder_fd, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
      if (fd < 0) continue;
      struct stat status {};
      std::error_code ignored;
      if (::fstat(fd, &status) == 0 && is_own(status, S_IFDIR) && take_over(fd))
        std::filesystem::remove_all(folder / name, ignored);
      ::close(fd);
    }
  } catch (const std::exception&) {  // as above
  }
  ::close(folder_fd);
}

}  // namespace isoshard
