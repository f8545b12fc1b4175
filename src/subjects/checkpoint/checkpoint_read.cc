// SPDX-License-Identifier: Apache-2.0
// Reading any part of any tensor out of the files of whichever ranks hold it.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "subjects/checkpoint/checkpoint.h"
#include "subjects/checkpoint/checkpoint_content.h"
#include "subjects/checkpoint/checkpoint_io.h"

namespace isoshard {
namespace {

/// Of one file, in the file's order.
std::vector<StoredRange> stored_ranges(const CheckpointContent& content, const std::string& name,
                                       const SavedTensor& tensor, int rank) {
  const SafetensorsFile& file = content.files.at(rank);
  const std::int64_t numel = numel_of(tensor.shape);
  if (!file.contains(ranges_name(name))) return {{0, 0, numel, rank}};
  const at::Tensor ranges = tensor_of(file.tensor(ranges_name(name)));
  const std::int64_t held = numel_of(file.info(name).shape);
  std::vector<StoredRange> stored;
  std::int64_t place = 0;
  bool fits = dtype_of(ranges) == Dtype::kInt64 && ranges.dim() == 2 && ranges.size(1) == 2;
  for (std::int64_t i = 0; fits && i < ranges.size(0); ++i) {
    const std::int64_t* const range = ranges.const_data_ptr<std::int64_t>() + 2 * i;
    fits = range[0] >= 0 && range[1] >= 1 && range[0] <= numel && range[1] <= numel - range[0] &&
           range[1] <= held - place;
    stored.push_back({range[0], place, range[1], rank});
    place += range[1];
  }
  if (fits && place == held) return stored;
  throw FileError(fmt::format("{}: {} must place each of the {} stored elements inside [{}]",
                              file.path().string(), ranges_name(name), held,
                              fmt::join(tensor.shape, ", ")));
}

/// Sorted by place in the whole. Copies are not saved, so ranges overlap only where ranks cut a
/// tensor differently; their bytes agree.
std::vector<StoredRange> without_overlaps(std::vector<StoredRange> ranges) {
  std::stable_sort(ranges.begin(), ranges.end(), [](const StoredRange& a, const StoredRange& b) {
    return a.global_begin < b.global_begin;
  });
  std::vector<StoredRange> disjoint;
  std::int64_t covered = 0;
  for (StoredRange range : ranges) {
    const std::int64_t known = std::max<std::int64_t>(0, covered - range.global_begin);
    if (known >= range.count) continue;
    range = {range.global_begin + known, range.file_begin + known, range.count - known, range.rank};
    covered = range.global_begin + range.count;
    disjoint.push_back(range);
  }
  return disjoint;
}

}  // namespace

const std::vector<StoredRange>& CheckpointContent::ranges(const std::string& name,
                                                          const SavedTensor& tensor) const {
  const std::lock_guard lock(mutex);
  const auto known = ranges_by_name.find(name);
  if (known != ranges_by_name.end()) return known->second;
  std::vector<StoredRange> all;
  for (const auto& [rank, hash] : tensor.hash_by_rank) {
    const SafetensorsFile& file = files.at(rank);
    if (const std::uint64_t actual = hash_of(file.bytes(name)); actual != hash) {
      throw FileError(
          fmt::format("{}: {}: checksum mismatch: computed {}, recorded in the manifest {}",
                      file.path().string(), name, hash_text(actual), hash_text(hash)));
    }
    const std::vector<StoredRange> own = stored_ranges(*this, name, tensor, rank);
    all.insert(all.end(), own.begin(), own.end());
  }
  return ranges_by_name.emplace(name, without_overlaps(std::move(all))).first->second;
}

void Checkpoint::read(std::string_view name, std::span<const FlatRange> ranges,
                      at::Tensor flat) const {
  const SavedTensor& saved = tensor(name);
  const std::string key(name);
  const std::vector<StoredRange>& stored = content_->ranges(key, saved);
  const std::size_t element = size_of(saved.dtype);
  auto* const out = static_cast<std::byte*>(flat.mutable_data_ptr());
  for (const FlatRange& range : ranges) {
    auto holder = std::upper_bound(
        stored.begin(), stored.end(), range.global_begin,
        [](std::int64_t begin, const StoredRange& s) { return begin < s.global_begin; });
    if (holder != stored.begin()) --holder;
    for (std::int64_t done = 0; done < range.count; ++holder) {
      const std::int64_t wanted = range.global_begin + done,
                         inside = holder == stored.end() ? 0 : wanted - holder->global_begin;
      if (holder == stored.end() || inside < 0 || inside >= holder->count) {
        throw FileError(fmt::format("{}: no rank's file holds element {} of {} [{}]",
                                    content_->manifest_path().string(), wanted, name,
                                    fmt::join(saved.shape, ", ")));
      }
      const std::int64_t count = std::min(range.count - done, holder->count - inside);
      const std::span<const std::byte> bytes = content_->files.at(holder->rank).bytes(name);
      std::memcpy(out + static_cast<std::size_t>(range.local_begin + done) * element,
                  bytes.data() + static_cast<std::size_t>(holder->file_begin + inside) * element,
                  static_cast<std::size_t>(count) * element);
      done += count;
    }
  }
}

at::Tensor Checkpoint::read_whole(std::string_view name) const {
  const SavedTensor& saved = tensor(name);
  at::Tensor whole = at::empty(saved.shape, at::TensorOptions().dtype(scalar_type_of(saved.dtype)));
  const FlatRange all{0, 0, whole.numel()};
  read(name, {&all, 1}, whole.view({-1}));
  return whole;
}

at::Tensor CheckpointWeights::read(const ParameterSpec& spec, const Shape& offset,
                                   const Shape& size) const {
  const std::string name = checkpoint_.stepped_name(spec.name);
  Layout layout = replicated(spec.shape);
  layout.explicit_parts = true;
  layout.boxes = {{Shape(size.size(), 0), offset, size}};
  const SavedTensor& saved = checkpoint_.tensor(name);
  if (saved.shape != spec.shape) {
    throw ShapeError(
        fmt::format("{} must have the same shape in model and checkpoint, got [{}] and [{}]",
                    spec.name, fmt::join(spec.shape, ", "), fmt::join(saved.shape, ", ")));
  }
  (void)tiling_problem(spec.shape, layout.boxes);  // refuses a box outside
  at::Tensor box = at::empty(size, at::TensorOptions().dtype(scalar_type_of(saved.dtype)));
  checkpoint_.read(name, ranges_of(layout, size, MeshShape(), 0), box.view({-1}));
  return box;
}

}  // namespace isoshard
