// SPDX-License-Identifier: Apache-2.0
// Opening a checkpoint: what its manifest says, and whether the files are there that it names.
#include "subjects/checkpoint/checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>

#include "core/base/error.h"
#include "core/base/sha256.h"
#include "core/observe/record_name.h"
#include "subjects/checkpoint/checkpoint_content.h"

namespace isoshard {
namespace {

using nlohmann::json;

constexpr int kSchema = 1;

SavedKind kind_of(const std::string& name) {
  for (const SavedKind kind : {SavedKind::kParameter, SavedKind::kMaster, SavedKind::kOptimizer}) {
    if (name == name_of(kind)) return kind;
  }
  throw FileError(
      fmt::format("the kind of a tensor must be parameter, master or optimizer, got '{}'", name));
}

Dtype dtype_named(const std::string& name) {
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
    if (name == name_of(dtype)) return dtype;
  }
  throw FileError(
      fmt::format("the dtype of a tensor must be fp64, fp32, bf16 or fp16, got '{}'", name));
}

std::uint64_t hash_in(const std::string& text) {
  std::uint64_t hash = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), hash, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) {
    throw FileError(fmt::format("a hash must have 16 hexadecimal digits, got '{}'", text));
  }
  return hash;
}

SavedTensor tensor_in(const json& entry, int world_size) {
  SavedTensor tensor;
  tensor.kind = kind_of(entry.at("kind").get<std::string>());
  tensor.dtype = dtype_named(entry.at("dtype").get<std::string>());
  tensor.shape = entry.at("shape").get<Shape>();
  for (const std::int64_t size : tensor.shape) {
    if (size < 1)
      throw FileError(fmt::format("every size of a shape must be at least 1, got [{}]",
                                  fmt::join(tensor.shape, ", ")));
  }
  for (const auto& [rank_text, hash] : entry.at("parts").items()) {
    int rank = -1;
    std::from_chars(rank_text.data(), rank_text.data() + rank_text.size(), rank);
    if (rank < 0 || rank >= world_size)
      throw FileError(
          fmt::format("a rank must be from 0 to {}, got '{}'", world_size - 1, rank_text));
    tensor.hash_by_rank[rank] = hash_in(hash.get<std::string>());
  }
  return tensor;
}

void read_manifest(const json& manifest, CheckpointContent& content) {
  if (const int schema = manifest.at("schema").get<int>(); schema != kSchema) {
    throw FileError(
        fmt::format("the schema must be {}, which this build reads, got {}", kSchema, schema));
  }
  if (const std::string said = manifest.at("sha256").get<std::string>(),
      actual = manifest_sha256(manifest);
      said != actual) {
    throw FileError(fmt::format("checksum mismatch: computed {}, recorded {}", actual, said));
  }
  content.id = manifest.at("id").get<std::string>();
  (void)hash_in(content.id);  // it is part of file names
  content.world_size = manifest.at("world_size").get<int>();
  const json& streams = manifest.at("streams");
  for (const json& stream : streams) {
    content.streams.push_back({stream.at("seed").get<std::uint64_t>(),
                               stream.at("next_step").get<std::int64_t>(),
                               stream.at("is_training").get<bool>()});
  }
  if (content.world_size < 1 ||
      static_cast<std::size_t>(content.world_size) != content.streams.size()) {
    throw FileError(fmt::format("there must be one stream for each of the {} ranks, got {}",
                                content.world_size, content.streams.size()));
  }
  content.progress.stream = content.streams.front();
  if (content.progress.stream.next_step < 0 ||
      content.progress.stream.next_step > std::numeric_limits<int>::max()) {
    throw FileError(fmt::format("the next step must be from 0 to 2^31-1, got {}",
                                content.progress.stream.next_step));
  }
  for (std::size_t rank = 1; rank < content.streams.size(); ++rank) {
    if (content.streams[rank].next_step == content.streams.front().next_step) continue;
    throw FileError(
        fmt::format("the next step must be the same on every rank, got {} on rank 0 "
                    "and {} on rank {}",
                    content.streams.front().next_step, content.streams[rank].next_step, rank));
  }
  content.progress.rule = manifest.at("optimizer").at("rule").get<std::string>();
  for (const auto& [name, count] : manifest.at("optimizer").at("updates").items()) {
    const auto updates = count.is_number_integer() ? count.get<std::int64_t>() : -1;
    // a step that is skipped updates nothing
    if (updates < 0 || updates > content.progress.stream.next_step) {
      throw FileError(fmt::format("the updates of {} must be from 0 to {}, the steps done, got {}",
                                  name, content.progress.stream.next_step, count.dump()));
    }
    content.progress.updates[name] = updates;
  }
  content.progress.numbers =
      manifest.at("numbers").get<std::map<std::string, double, std::less<>>>();
  if (manifest.contains("training")) {
    if (!manifest.at("training").is_object())
      throw FileError(fmt::format("\"training\" must be an object, got {}",
                                  manifest.at("training").type_name()));
    content.progress.training = manifest.at("training").dump();
  }
  for (const auto& [rank_text, file] : manifest.at("files").items()) {
    content.sha256_by_rank[std::stoi(rank_text)] = file.at("sha256").get<std::string>();
  }
  for (const auto& [name, entry] : manifest.at("tensors").items())
    content.tensors.emplace(name, tensor_in(entry, content.world_size));
}

/// The file's own words about itself.
void check_identity(const SafetensorsFile& file, const CheckpointContent& content, int rank) {
  const auto said = [&](const std::string& key) {
    const auto found = file.metadata().find(key);
    return found == file.metadata().end() ? std::string("unknown") : found->second;
  };
  const std::string expected_rank = fmt::format("{}", rank),
                    expected_world = fmt::format("{}", content.world_size);
  if (said("checkpoint") == content.id && said("rank") == expected_rank &&
      said("world_size") == expected_world)
    return;
  throw FileError(
      fmt::format("{}: belongs to rank {} of {} of the checkpoint {}, but the manifest names rank "
                  "{} of {} of {}",
                  file.path().string(), said("rank"), said("world_size"), said("checkpoint"),
                  expected_rank, expected_world, content.id));
}

void check_tensors(const SafetensorsFile& file, const CheckpointContent& content, int rank) {
  std::set<std::string, std::less<>> expected;
  for (const auto& [name, tensor] : content.tensors) {
    if (!tensor.hash_by_rank.contains(rank)) continue;
    if (!file.contains(name))
      throw FileError(
          fmt::format("{}: lacks {}, which the manifest lists", file.path().string(), name));
    const SafetensorsInfo& info = file.info(name);
    const bool has_ranges = file.contains(ranges_name(name));
    if (info.dtype != tensor.dtype || (!has_ranges && info.shape != tensor.shape)) {
      throw FileError(fmt::format("{}: {} must fit {} [{}] in the manifest, got {} [{}]",
                                  file.path().string(), name, name_of(tensor.dtype),
                                  fmt::join(tensor.shape, ", "), name_of(info.dtype),
                                  fmt::join(info.shape, ", ")));
    }
    expected.insert(name);
    if (has_ranges) expected.insert(ranges_name(name));
  }
  for (const std::string& name : file.names()) {
    if (!expected.contains(name))
      throw FileError(fmt::format("{}: holds {}, which the manifest does not list",
                                  file.path().string(), name));
  }
}

void open_files(CheckpointContent& content) {
  std::set<int> ranks;
  for (const auto& [name, tensor] : content.tensors) {
    for (const auto& [rank, hash] : tensor.hash_by_rank) ranks.insert(rank);
  }
  for (const int rank : ranks) {
    const std::filesystem::path path =
        content.folder / rank_file_name(content.progress.stream.next_step, content.id, rank);
    if (!content.sha256_by_rank.contains(rank)) {
      throw FileError(
          fmt::format("{}: lists no file of rank {}", content.manifest_path().string(), rank));
    }
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) {
      throw FileError(
          fmt::format("{}: the file of rank {} is missing; the manifest names {} files of a world "
                      "of {} ranks",
                      path.string(), rank, ranks.size(), content.world_size));
    }
    SafetensorsFile file = SafetensorsFile::open(path);
    check_identity(file, content, rank);
    check_tensors(file, content, rank);
    content.files.emplace(rank, std::move(file));
  }
}

}  // namespace

std::string_view name_of(SavedKind kind) noexcept {
  switch (kind) {
    case SavedKind::kParameter:
      return "parameter";
    case SavedKind::kMaster:
      return "master";
    case SavedKind::kOptimizer:
      return "optimizer";
  }
  return "unknown";
}

std::string rank_file_name(std::int64_t steps_done, std::string_view id, int rank) {
  return fmt::format("step{:08}-{}-rank{:05}.safetensors", steps_done, id, rank);
}

std::string ranges_name(std::string_view tensor) {
  return fmt::format("{}:ranges", tensor);
}

std::string manifest_sha256(json manifest) {
  manifest.erase("sha256");
  const std::string text = manifest.dump();  // keys are in order, numbers as short as they can be
  return sha256_hex(std::as_bytes(std::span(text)));
}

std::string hash_text(std::uint64_t hash) {
  return fmt::format("{:016x}", hash);
}

Checkpoint Checkpoint::open(const std::filesystem::path& folder) {
  auto content = std::make_shared<Content>();
  content->folder = folder;
  const std::filesystem::path path = content->manifest_path();
  const json manifest = read_json_file(path);
  try {
    read_manifest(manifest, *content);
  } catch (const json::exception& error) {
    throw FileError(
        fmt::format("{}: is not the manifest of a checkpoint: {}", path.string(), error.what()));
  } catch (const FileError& error) {
    throw FileError(fmt::format("{}: {}", path.string(), error.what()));
  } catch (const std::logic_error&) {
    throw FileError(fmt::format("{}: is not the manifest of a checkpoint: a rank must be a number",
                                path.string()));
  }
  open_files(*content);
  Checkpoint checkpoint;
  checkpoint.content_ = std::move(content);
  return checkpoint;
}

const std::string& Checkpoint::id() const noexcept {
  return content_->id;
}

std::int64_t Checkpoint::steps_done() const noexcept {
  return content_->progress.stream.next_step;
}

const std::string& Checkpoint::training() const noexcept {
  return content_->progress.training;
}

int Checkpoint::world_size() const noexcept {
  return content_->world_size;
}

RunProgress Checkpoint::progress(int rank, int world_size) const {
  RunProgress progress = content_->progress;
  const std::vector<StreamState>& streams = content_->streams;
  if (world_size == content_->world_size) {
    progress.stream = streams.at(static_cast<std::size_t>(rank));
    return progress;
  }
  const auto other = std::find_if(streams.begin(), streams.end(), [&](const StreamState& stream) {
    return stream != streams.front();
  });
  if (other == streams.end()) return progress;
  throw FileError(fmt::format(
      "{}: the random streams of rank 0 (seed {}, step {}) and rank {} (seed {}, step {}) differ, "
      "so a world of another size cannot resume from them",
      content_->manifest_path().string(), streams.front().seed, streams.front().next_step,
      other - streams.begin(), other->seed, other->next_step));
}

const std::map<std::string, SavedTensor, std::less<>>& Checkpoint::tensors() const noexcept {
  return content_->tensors;
}

const SavedTensor& Checkpoint::tensor(std::string_view name) const {
  const auto found = content_->tensors.find(name);
  if (found == content_->tensors.end()) {
    throw FileError(fmt::format("{}: has no tensor {}", content_->manifest_path().string(), name));
  }
  return found->second;
}

std::string Checkpoint::stepped_name(std::string_view parameter) const {
  std::string master = to_string(RecordName{parameter, NameRole::kMaster});
  const auto found = content_->tensors.find(master);
  return found != content_->tensors.end() && found->second.kind == SavedKind::kMaster
             ? master
             : std::string(parameter);
}

std::vector<std::string> Checkpoint::state_names(std::string_view parameter) const {
  std::vector<std::string> names;
  const std::string prefix = fmt::format("{}.", parameter);
  for (auto it = content_->tensors.lower_bound(prefix);
       it != content_->tensors.end() && it->first.starts_with(prefix); ++it) {
    if (it->second.kind == SavedKind::kOptimizer) names.push_back(it->first);
  }
  return names;
}

}  // namespace isoshard
