// SPDX-License-Identifier: Apache-2.0
/// The content of an open checkpoint, private to the implementation of
/// subjects/checkpoint/checkpoint.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "subjects/checkpoint/checkpoint.h"

namespace isoshard {

/// Elements of a flattened whole that a rank's file holds.
struct StoredRange {
  std::int64_t global_begin = 0, file_begin = 0, count = 0;
  int rank = 0;
};

struct CheckpointContent {
  std::filesystem::path folder;
  std::string id;
  int world_size = 0;
  RunProgress progress;
  std::vector<StreamState> streams;  ///< by rank
  std::map<std::string, SavedTensor, std::less<>> tensors;
  std::map<int, std::string> sha256_by_rank;
  std::map<int, SafetensorsFile> files;

  mutable std::mutex mutex;
  mutable std::map<std::string, std::vector<StoredRange>, std::less<>> ranges_by_name;

  [[nodiscard]] std::filesystem::path manifest_path() const { return folder / kManifestName; }
  /// By begin in the whole. Errors   FileError for bytes that do not have the manifest's hash; the
  /// ranges are read once, at the first call.
  [[nodiscard]] const std::vector<StoredRange>& ranges(const std::string& name,
                                                       const SavedTensor& tensor) const;
};

struct Checkpoint::Content : CheckpointContent {};

/// SHA-256 of a manifest without its own "sha256", however it is laid out. `manifest` must be an
/// object.
[[nodiscard]] std::string manifest_sha256(nlohmann::json manifest);

/// XXH3.
[[nodiscard]] std::uint64_t hash_of(std::span<const std::byte> bytes) noexcept;

}  // namespace isoshard
