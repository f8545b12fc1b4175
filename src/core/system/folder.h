// SPDX-License-Identifier: Apache-2.0
/// An open folder: what is made, renamed and removed in it is in that folder, whatever its name
/// leads to meanwhile.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace isoshard {

/// Guarantees   no operation follows a symbolic link in the place of an entry. Below a folder that
///              an AnchoredFolder holds no link is followed at all, and the held folder itself is
///              used, even if its name was given to something else meanwhile.
/// Errors       std::system_error with the system's reason. Callers say what they were about.
///
///     const Folder out = Folder::make("out/runs");
///     out.remove_tree("step0000");
class Folder {
 public:
  [[nodiscard]] static Folder open(const std::filesystem::path& path);
  /// Makes the folder and those above it if they are missing.
  [[nodiscard]] static Folder make(const std::filesystem::path& path);
  Folder(Folder&& other) noexcept;
  Folder& operator=(Folder&& other) noexcept;
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder();

  [[nodiscard]] int fd() const noexcept { return fd_; }
  /// Sorted, without . and ..
  [[nodiscard]] std::vector<std::string> names() const;
  /// Of the entry itself, not of what a link leads to; not_found if there is none.
  [[nodiscard]] std::filesystem::file_type type_of(const std::string& name) const;
  /// Also a link. No error if it is not there.
  void remove_file(const std::string& name) const;
  /// A file, a link, or a folder with all that is in it. No error if it is not there.
  void remove_tree(const std::string& name) const;

 private:
  explicit Folder(int fd) noexcept : fd_(fd) {}
  int fd_ = -1;
};

/// From now on, until destruction, whatever this process and its ranks open as a Folder at or below
/// `path` is found from `fd`, by its parts, with no link followed.
class AnchoredFolder {
 public:
  AnchoredFolder(const std::filesystem::path& path, int fd);
  AnchoredFolder(const AnchoredFolder&) = delete;
  AnchoredFolder& operator=(const AnchoredFolder&) = delete;
  ~AnchoredFolder();

 private:
  std::filesystem::path path_;
};

/// "a FIFO", "a directory", ...: in words for errors.
[[nodiscard]] std::string in_words(std::filesystem::file_type type);

}  // namespace isoshard
