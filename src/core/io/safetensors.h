// SPDX-License-Identifier: Apache-2.0
/// Reading and writing safetensors files, without ATen: an 8-byte length, a JSON header, the
/// tensors' bytes.
///
/// Source   https://github.com/huggingface/safetensors (README, "Format"); the checks here are at
///          least as strict.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/host_tensor.h"
#include "core/base/sha256.h"

namespace isoshard {

/// Where a tensor lies in the data part of its file.
struct SafetensorsInfo {
  Dtype dtype = Dtype::kFloat32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< in bytes after the header
  std::uint64_t end = 0;
};

/// An open file. Copies share the mapping.
///
/// Guarantees   every tensor of an opened file can be read; nothing was allocated by a number that
///              the file claims.
/// Errors       open() throws FileError naming the file and the tensor or field for anything that
///              is not a well-formed file: lengths, JSON, duplicate or unprintable names, unknown
///              dtypes, shapes that overflow, data with holes, overlaps or a tail. Pickles are
///              refused by suffix (.pt .pth .bin .ckpt .pkl) and content, never read.
///
///     const SafetensorsFile file = SafetensorsFile::open(path);
///     const HostTensor weight = file.tensor("model.norm.weight");
class SafetensorsFile {
 public:
  [[nodiscard]] static SafetensorsFile open(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  /// Sorted.
  [[nodiscard]] const std::vector<std::string>& names() const noexcept { return names_; }
  [[nodiscard]] bool contains(std::string_view name) const {
    return infos_.find(name) != infos_.end();
  }
  /// Errors   FileError with a suggestion if there is no such tensor (also tensor and bytes).
  [[nodiscard]] const SafetensorsInfo& info(std::string_view name) const;
  /// A view of the mapped file that keeps the mapping alive; a copy only where the bytes are not
  /// aligned for the dtype. The memory is read-only: writing into it is a SIGSEGV.
  [[nodiscard]] HostTensor tensor(std::string_view name) const;
  /// Valid as long as this object or a copy of it lives.
  [[nodiscard]] std::span<const std::byte> bytes(std::string_view name) const;
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept {
    return metadata_;
  }
  /// The whole file, header and all; valid as long as this object or a copy of it lives.
  [[nodiscard]] std::span<const std::byte> file_bytes() const noexcept;

 private:
  struct Mapping;
  SafetensorsFile() = default;

  std::filesystem::path path_;
  std::shared_ptr<const Mapping> mapping_;
  std::vector<std::string> names_;
  std::map<std::string, SafetensorsInfo, std::less<>> infos_;
  std::map<std::string, std::string> metadata_;
};

/// One tensor to write.
struct SafetensorsEntry {
  std::string name;
  Dtype dtype = Dtype::kFloat32;
  std::vector<std::int64_t> shape;
  /// Called once, when it is the tensor's turn; the result is let go before the next one's
  std::function<HostTensor()> read;
};

/// Writes the tensors atomically (see AtomicFile), one at a time. `hash`, if given, is fed with the
/// bytes of the file.
///
/// Data are laid out by decreasing element size and, within that, in the given order, from an
/// 8-byte boundary on, so that every tensor is aligned. Equal arguments give equal bytes.
/// Errors   UsageError for a name that the reader would refuse or that stands twice; ShapeError
///          where `read` gives another number of bytes than shape and dtype say;
///          InfrastructureError with file and bytes if writing fails.
void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsEntry> tensors,
                       const std::map<std::string, std::string>& metadata = {},
                       Sha256* hash = nullptr);

}  // namespace isoshard
