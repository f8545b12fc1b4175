// SPDX-License-Identifier: Apache-2.0
/// A regular file mapped read-only into memory.
#pragma once
#include <cstddef>
#include <filesystem>
#include <span>

namespace isoshard {

/// Requires     nobody shortens the file while it is mapped: reading beyond its new end is a
///              SIGBUS.
/// Guarantees   the bytes stay mapped until destruction; writing to them is a SIGSEGV; opening
///              never blocks.
/// Errors       FileError if the path is missing, unreadable, or not a regular file (a FIFO,
///              directory, device or socket is named).
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

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace isoshard
