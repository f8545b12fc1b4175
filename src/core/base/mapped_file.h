// SPDX-License-Identifier: Apache-2.0
/// A regular file as read-only memory.
#pragma once
#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace isoshard {

/// Small files are read, large ones are mapped.
///
/// Guarantees   the bytes stay there until destruction; writing to them is a SIGSEGV; opening
///              never blocks. A file that another program shortens or rewrites meanwhile raises no
///              signal: bytes that are gone are read as zeros, and require_unchanged_inputs()
///              throws.
/// Errors       FileError if the path is missing, unreadable, or not a regular file (a FIFO,
///              directory, device or socket is named), or if a small file changed while it was
///              read.
///
///     const MappedFile file(path);
///     parse(file.bytes());
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  /// What require_unchanged_inputs() throws; empty if it does not.
  [[nodiscard]] static std::string problem_of_any();

 private:
  struct Watched;

  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::unique_ptr<Watched> watched_;  ///< of a mapped file
};

/// Call it before anything that was made from input files is believed: at the end of a run, of a
/// case, of a command.
///
/// A file that was replaced by a new one under its name has not changed: what is mapped is the old
/// one.
/// Errors   FileError "FILE: changed while reading: ..." if the size or the time of modification of
///          a mapped file is not what it was when it was opened. It is told each time while the
///          file is open; after it was closed once, unless it was told before.
void require_unchanged_inputs();

}  // namespace isoshard
