// SPDX-License-Identifier: Apache-2.0
/// SHA-256 of bytes and files, in lower-case hex.
#pragma once
#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace isoshard {

/// A hash that is fed piece by piece.
///
///     Sha256 hash;
///     hash.update(bytes);
///     const std::string digest = hash.hex_digest();
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void update(std::span<const std::byte> bytes);
  /// Returns the digest of all bytes so far. Call it once, as the last member.
  [[nodiscard]] std::string hex_digest();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

[[nodiscard]] std::string sha256_hex(std::span<const std::byte> bytes);

/// Errors   FileError if the file cannot be read or is not a regular file.
[[nodiscard]] std::string sha256_hex_of_file(const std::filesystem::path& path);

}  // namespace isoshard
