// SPDX-License-Identifier: Apache-2.0
/// The files of a bundle and what seals them: manifest.json lists the SHA-256 of every other file.
#pragma once
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "core/io/safetensors.h"

namespace isoshard::detail {

/// Writes files below a folder and remembers their hashes.
///
///     files.write("responses.json", text);
///     manifest["files"] = files.hashes();
class SealingWriter {
 public:
  explicit SealingWriter(std::filesystem::path directory) : directory_(std::move(directory)) {}
  /// `name` is relative to the folder, with slashes. Errors   as AtomicFile.
  void write(const std::string& name, std::string_view text);
  /// Errors   as write_safetensors.
  void write(const std::string& name, std::span<const SafetensorsEntry> tensors);
  [[nodiscard]] const std::map<std::string, std::string>& hashes() const noexcept {
    return hashes_;
  }

 private:
  std::filesystem::path directory_;
  std::map<std::string, std::string> hashes_;  ///< name -> SHA-256 in lower-case hex
};

/// Reads files below a folder and holds each to the hash that the manifest lists. Each file is
/// mapped once, and hashed where it is mapped.
class SealedFiles {
 public:
  /// Nothing is listed: every file is taken as it is.
  explicit SealedFiles(std::filesystem::path directory) : directory_(std::move(directory)) {}
  /// Checks the list, and that the folder holds what it lists and nothing else, before any of it is
  /// read.
  /// Errors   FileError that starts with the manifest's or the file's path: the list is malformed,
  ///          a name is no plain path below the folder, a file is missing or not listed, or is
  ///          neither a regular file nor a folder (a symbolic link, too).
  SealedFiles(std::filesystem::path directory, const nlohmann::json& manifest);

  [[nodiscard]] bool is_sealed() const noexcept { return is_sealed_; }
  [[nodiscard]] std::filesystem::path path_of(const std::string& name) const {
    return directory_ / name;
  }
  [[nodiscard]] bool contains(const std::string& name) const;
  /// Errors   FileError if the file is unreadable or is not what was sealed (also json and tensors,
  ///          with parse_json's and SafetensorsFile's).
  [[nodiscard]] std::string text(const std::string& name);
  [[nodiscard]] nlohmann::json json(const std::string& name);
  [[nodiscard]] SafetensorsFile tensors(const std::string& name);
  /// Checks what nobody has read. Errors   as text.
  void check_rest();

 private:
  void check(const std::string& name, std::span<const std::byte> bytes);

  std::filesystem::path directory_;
  bool is_sealed_ = false;
  std::map<std::string, std::string> hashes_;
  std::set<std::string> checked_;
};

}  // namespace isoshard::detail
