// SPDX-License-Identifier: Apache-2.0
// Checkpoints that this program wrote (docs/reference/checkpoints.md), without LibTorch. Every byte
// is covered: the manifest by its own SHA-256, the files by those in the manifest.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "core/base/error.h"
#include "core/base/refuse.h"
#include "core/base/sha256.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "harness/checkpoints/stored_checkpoint.h"

namespace isoshard::detail {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kSchema = 1;

/// Where a rank's elements lie in the flattened whole.
struct Piece {
  SafetensorsFile file;
  std::vector<FlatRange> ranges;
};

std::vector<FlatRange> ranges_in(const SafetensorsFile& file, const std::string& name,
                                 const Shape& shape) {
  const std::int64_t numel = numel_of(shape);
  const std::string ranges_name = name + ":ranges";
  const std::int64_t held = file.tensor(name).numel();
  if (!file.contains(ranges_name)) {
    if (file.info(name).shape != shape)
      refuse(file.path(),
             fmt::format("{} must have the shape [{}] of the manifest, got [{}]", name,
                         fmt::join(shape, ", "), fmt::join(file.info(name).shape, ", ")));
    return {{0, 0, numel}};
  }
  const HostTensor table = file.tensor(ranges_name);
  bool fits = table.dtype == Dtype::kInt64 && table.shape.size() == 2 && table.shape[1] == 2;
  std::vector<FlatRange> ranges;
  std::int64_t place = 0;
  for (std::int64_t row = 0; fits && row < table.shape[0]; ++row) {
    std::int64_t numbers[2];
    std::memcpy(numbers, table.bytes.data() + static_cast<std::size_t>(row) * sizeof numbers,
                sizeof numbers);
    const auto [begin, count] = std::pair(numbers[0], numbers[1]);
    fits = begin >= 0 && count >= 1 && begin <= numel && count <= numel - begin &&
           count <= held - place;
    ranges.push_back({place, begin, count});
    place += count;
  }
  if (!fits || place != held)
    refuse(file.path(), fmt::format("{} must place each of the {} stored elements inside [{}]",
                                    ranges_name, held, fmt::join(shape, ", ")));
  return ranges;
}

HostTensor whole_of(Dtype dtype, const Shape& shape, const std::string& name,
                    const std::vector<Piece>& pieces) {
  if (pieces.size() == 1 && pieces.front().file.info(name).shape == shape &&
      !pieces.front().file.contains(name + ":ranges"))
    return pieces.front().file.tensor(name);
  const std::size_t element = size_of(dtype);
  const auto bytes =
      std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(numel_of(shape)) * element);
  const auto for_each_range = [&](const auto& visit) {
    for (const Piece& piece : pieces) {
      for (const FlatRange& range : piece.ranges)
        visit(piece,
              piece.file.bytes(name).subspan(static_cast<std::size_t>(range.local_begin) * element,
                                             static_cast<std::size_t>(range.count) * element),
              static_cast<std::size_t>(range.global_begin));
    }
  };
  for_each_range([&](const Piece&, std::span<const std::byte> held, std::size_t begin) {
    std::ranges::copy(held, bytes->begin() + static_cast<std::ptrdiff_t>(begin * element));
  });
  // Where ranges overlap, the last one counts: an earlier one that differs from it is refused.
  for_each_range([&](const Piece& piece, std::span<const std::byte> held, std::size_t begin) {
    if (std::memcmp(held.data(), bytes->data() + begin * element, held.size()) == 0) return;
    const auto differing =
        std::ranges::mismatch(held, std::span(*bytes).subspan(begin * element)).in1 - held.begin();
    refuse(piece.file.path(),
           fmt::format("{}: element {} must be the same in all files that hold it, got another one "
                       "than in a later rank's file",
                       name, begin + static_cast<std::size_t>(differing) / element));
  });
  return {dtype, shape, *bytes, bytes};
}

class Reader {
 public:
  explicit Reader(const fs::path& folder) : folder_(folder), manifest_(folder / "manifest.json") {
    checkpoint_.path = folder;
  }

  StoredCheckpoint run() {
    const json manifest = read_json_file(manifest_);
    try {
      read(manifest);
    } catch (const json::exception& error) {
      refuse(manifest_, fmt::format("is not the manifest of a checkpoint: {}", error.what()));
    }
    return std::move(checkpoint_);
  }

 private:
  void read(const json& manifest) {
    if (const int schema = manifest.at("schema").get<int>(); schema != kSchema)
      refuse(manifest_,
             fmt::format("the schema must be {}, which this build reads, got {}", kSchema, schema));
    json content = manifest;
    content.erase("sha256");
    const std::string text = content.dump();
    if (const std::string said = manifest.at("sha256").get<std::string>(),
        actual = sha256_hex(std::as_bytes(std::span(text)));
        said != actual)
      refuse(manifest_, fmt::format("checksum mismatch: computed {}, recorded {}", actual, said));
    open_files(manifest);
    for (const auto& [name, entry] : manifest.at("tensors").items()) add(name, entry);
    for (const auto& [name, count] : manifest.at("optimizer").at("updates").items())
      add_step(name, count.get<std::int64_t>());
    for (const auto& [name, number] : manifest.at("numbers").items())
      checkpoint_.left_out.push_back(fmt::format("{}: not compared: the number {} ({})",
                                                 manifest_.string(), name, number.dump()));
  }

  void open_files(const json& manifest) {
    for (const auto& [rank, entry] : manifest.at("files").items()) {
      const std::string name = entry.at("name").get<std::string>();
      if (name.empty() || fs::path(name).filename() != name)
        refuse(manifest_, fmt::format("a file must be a name in the same folder, got '{}'", name));
      const fs::path path = folder_ / name;
      std::error_code ignored;
      if (!fs::exists(path, ignored))
        refuse(path, fmt::format("the file of rank {} is missing", rank));
      SafetensorsFile file = SafetensorsFile::open(path);
      if (const std::string said = entry.at("sha256").get<std::string>(),
          actual = sha256_hex(file.file_bytes());
          said != actual)
        refuse(path, fmt::format("checksum mismatch: computed {}, recorded in the manifest {}",
                                 actual, said));
      files_.emplace(rank, std::move(file));
    }
  }

  void add(const std::string& name, const json& entry) {
    StoredTensor tensor;
    tensor.dtype = parse_dtype(entry.at("dtype").get<std::string>());
    tensor.shape = entry.at("shape").get<Shape>();
    for (const std::int64_t size : tensor.shape) {
      if (size < 1) refuse(manifest_, fmt::format("{}: sizes must be at least 1", name));
    }
    tensor.kind = entry.at("kind").get<std::string>() == "parameter" ? RecordKind::kParam
                                                                     : RecordKind::kOptimizer;
    tensor.file = manifest_.string();
    std::vector<Piece> pieces;
    std::vector<FlatRange> all;
    for (const auto& [rank, unused] : entry.at("parts").items()) {
      const auto file = files_.find(rank);
      if (file == files_.end())
        refuse(manifest_, fmt::format("lists no file of rank {}, which holds {}", rank, name));
      if (!file->second.contains(name) || file->second.info(name).dtype != tensor.dtype)
        refuse(file->second.path(), fmt::format("must hold {} in {}", name, name_of(tensor.dtype)));
      pieces.push_back({file->second, ranges_in(file->second, name, tensor.shape)});
      all.insert(all.end(), pieces.back().ranges.begin(), pieces.back().ranges.end());
    }
    require_whole(name, tensor.shape, all);
    tensor.read = [dtype = tensor.dtype, shape = tensor.shape, name, pieces] {
      return whole_of(dtype, shape, name, pieces);
    };
    checkpoint_.tensors.emplace(name, std::move(tensor));
  }

  /// Ranks may cut a tensor differently; then their ranges overlap (with equal bytes: whole_of).
  void require_whole(const std::string& name, const Shape& shape, std::vector<FlatRange> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const FlatRange& a, const FlatRange& b) {
      return a.global_begin < b.global_begin;
    });
    std::int64_t covered = 0;
    for (const FlatRange& range : ranges) {
      if (range.global_begin > covered) break;
      covered = std::max(covered, range.global_begin + range.count);
    }
    if (covered < numel_of(shape))
      refuse(manifest_, fmt::format("no rank's file holds element {} of {} [{}]", covered, name,
                                    fmt::join(shape, ", ")));
  }

  /// As other frameworks save it: an fp32 number.
  void add_step(const std::string& parameter, std::int64_t updates) {
    const auto bytes = std::make_shared<std::vector<std::byte>>(sizeof(float));
    const auto value = static_cast<float>(updates);
    std::memcpy(bytes->data(), &value, sizeof value);
    checkpoint_.tensors.emplace(
        parameter + ".step",
        StoredTensor{RecordKind::kOptimizer, Dtype::kFloat32, {}, manifest_.string(), [bytes] {
                       return HostTensor{Dtype::kFloat32, {}, *bytes, bytes};
                     }});
  }

  fs::path folder_, manifest_;
  StoredCheckpoint checkpoint_;
  std::map<std::string, SafetensorsFile> files_;
};

}  // namespace

StoredCheckpoint open_own_checkpoint(const fs::path& folder) {
  return Reader(folder).run();
}

}  // namespace isoshard::detail
