// SPDX-License-Identifier: Apache-2.0
/// A file that appears under its name complete or not at all.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/system/folder.h"

namespace isoshard {

/// Writes to a temporary name in the same directory; commit() flushes it to disk and renames it
/// into place.
///
/// Guarantees   readers of `path` see either the old content or all of the new content; without
///              commit(), or after an error, the temporary file is gone and `path` is untouched.
///              The folder is opened once (core/system/folder.h): if its name is given to something
///              else meanwhile, nothing is written there. A symbolic link in the place of the file
///              is replaced, not followed. Temporary files that killed runs have left beside it are
///              removed.
/// Errors       InfrastructureError that names the file, the bytes written so far and the system's
///              reason; that says what is there if it is no regular file (a directory, FIFO, device
///              or socket).
///
///     AtomicFile file(path);
///     file.write(bytes);
///     file.commit();
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text.data(), text.size()))); }
  void commit();
  [[nodiscard]] std::uint64_t bytes_written() const noexcept { return bytes_written_; }

 private:
  [[noreturn]] void fail(std::string_view doing, int error);
  void discard() noexcept;

  void require_replaceable() const;

  std::filesystem::path path_;
  std::string name_;
  std::optional<Folder> folder_;
  std::string temporary_;  ///< its name in the folder; empty: there is none
  int fd_ = -1;
  std::uint64_t bytes_written_ = 0;
};

/// Writes `text` as the whole content of `path`, atomically. Errors as AtomicFile.
void write_file_atomically(const std::filesystem::path& path, std::string_view text);

}  // namespace isoshard
