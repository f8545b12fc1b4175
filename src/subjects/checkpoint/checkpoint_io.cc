// SPDX-License-Identifier: Apache-2.0
// Writing: what every rank holds is told to all, each part is
// written once, and the manifest comes last.
#include "subjects/checkpoint/checkpoint_io.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/sha256.h"
#include "core/comm/tensor.h"
#include "core/io/tensor_files.h"
#include "subjects/checkpoint/checkpoint_content.h"
#include "subjects/parallel/data_parallel.h"

namespace isoshard {
namespace {

using nlohmann::json;

constexpr CallInfo kCall{Purpose::kSetup, Axis::kWorld, {}};

/// Every rank's text, in rank order, on every rank.
std::vector<std::string> gathered(Communicator& world, std::string own) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(world.size()));
  const auto size = static_cast<std::int64_t>(own.size());
  world
      .all_gather({reinterpret_cast<const std::byte*>(&size), 1, Dtype::kInt64},
                  {reinterpret_cast<std::byte*>(counts.data()), world.size(), Dtype::kInt64}, kCall)
      .wait();
  std::string all(
      static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})),
      '\0');
  world
      .all_gather_uneven({reinterpret_cast<const std::byte*>(own.data()), size, Dtype::kUint8},
                         {reinterpret_cast<std::byte*>(all.data()),
                          static_cast<std::int64_t>(all.size()), Dtype::kUint8},
                         counts, kCall)
      .wait();
  std::vector<std::string> texts;
  std::size_t begin = 0;
  for (const std::int64_t count : counts) {
    texts.push_back(all.substr(begin, static_cast<std::size_t>(count)));
    begin += static_cast<std::size_t>(count);
  }
  return texts;
}

/// A part as its file holds it: without padding, one range after the other.
struct PackedPart {
  std::string name;
  SavedKind kind = SavedKind::kParameter;
  Shape shape;  ///< of the whole
  at::Tensor packed;
  std::vector<FlatRange> ranges;
  std::uint64_t hash = 0;
  bool is_finite = true;
};

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

at::Tensor packed_of(const at::Tensor& local, const std::vector<FlatRange>& ranges) {
  const at::Tensor flat = local.contiguous().view({-1});
  std::int64_t end = 0;
  bool is_dense = true;
  for (const FlatRange& range : ranges) {
    is_dense = is_dense && range.local_begin == end;
    end += range.count;
  }
  if (is_dense && end == flat.numel()) return flat;
  std::vector<at::Tensor> parts{flat.narrow(0, 0, 0)};
  for (const FlatRange& range : ranges)
    parts.push_back(flat.narrow(0, range.local_begin, range.count));
  return at::cat(parts);
}

PackedPart packed(const SavedPart& part, const Mesh& mesh) {
  PackedPart result{part.name, part.kind, part.layout.global_shape, {}, {}, 0, true};
  result.ranges = ranges_of(part.layout, part.tensor.sizes().vec(), mesh.shape(), mesh.rank());
  result.packed = packed_of(part.tensor, result.ranges);
  result.hash = hash_of(bytes_of(result.packed));
  result.is_finite = at::isfinite(result.packed).all().item<bool>();
  return result;
}

std::uint64_t hash_of_places(const std::vector<FlatRange>& ranges) {
  std::vector<std::int64_t> places;
  for (const FlatRange& range : ranges)
    places.insert(places.end(), {range.global_begin, range.count});
  return hash_of(std::as_bytes(std::span(places)));
}

json stream_json(const StreamState& stream) {
  return {
      {"seed", stream.seed}, {"next_step", stream.next_step}, {"is_training", stream.is_training}};
}

/// What the other ranks must know of this rank's parts: empty ones are left out.
std::string announcement(const RunProgress& progress, const std::vector<PackedPart>& parts) {
  json entries = json::array();
  for (const PackedPart& part : parts) {
    if (part.packed.numel() == 0) continue;
    entries.push_back({{"name", part.name},
                       {"kind", name_of(part.kind)},
                       {"dtype", name_of(dtype_of(part.packed))},
                       {"shape", part.shape},
                       {"places", hash_text(hash_of_places(part.ranges))},
                       {"hash", hash_text(part.hash)},
                       {"is_finite", part.is_finite}});
  }
  return json({{"stream", stream_json(progress.stream)},
               {"rule", progress.rule},
               {"updates", progress.updates},
               {"numbers", progress.numbers},
               {"parts", entries}})
      .dump();
}

/// What all ranks hold, and who writes what: computed alike on every rank.
struct Inventory {
  json streams = json::array();
  json tensors = json::object();  ///< of the manifest
  json updates = json::object();  ///< of all ranks' parameters
  std::set<int> writers;
  std::string problem;      ///< why it cannot be saved
  bool is_of_state = true;  ///< and not of ranks that are at different steps
  std::string id;
};

Inventory inventory_of(const std::vector<std::string>& announcements) {
  Inventory inventory;
  // by tensor and places: rank, hash
  std::map<std::pair<std::string, std::string>, std::pair<int, std::string>> first_copy;
  std::string told;
  for (std::size_t rank = 0; rank < announcements.size(); ++rank) {
    told += announcements[rank];
    const json own = json::parse(announcements[rank]);
    inventory.streams.push_back(own.at("stream"));
    if (own.at("stream").at("next_step") != inventory.streams.front().at("next_step") &&
        inventory.problem.empty()) {
      inventory.problem = fmt::format("rank {} is at step {}, rank 0 at step {}", rank,
                                      own.at("stream").at("next_step").dump(),
                                      inventory.streams.front().at("next_step").dump());
      inventory.is_of_state = false;
    }
    for (const auto& [parameter, count] : own.at("updates").items()) {
      const json& first = inventory.updates.emplace(parameter, count).first.value();
      if (first == count || !inventory.problem.empty()) continue;
      inventory.problem = fmt::format("rank {} has made {} updates of {}, ranks before it {}", rank,
                                      count.dump(), parameter, first.dump());
    }
    for (const json& part : own.at("parts")) {
      const auto name = part.at("name").get<std::string>(),
                 hash = part.at("hash").get<std::string>();
      if (!part.at("is_finite").get<bool>() && inventory.problem.empty()) {
        inventory.problem = fmt::format("{} of rank {} holds a NaN or an infinity", name, rank);
      }
      const auto [copy, is_first] = first_copy.try_emplace(
          {name, part.at("places").get<std::string>()}, static_cast<int>(rank), hash);
      if (!is_first) {
        if (copy->second.second != hash && inventory.problem.empty()) {
          inventory.problem = fmt::format("the copies of {} on ranks {} and {} differ", name,
                                          copy->second.first, rank);
        }
        continue;
      }
      json& tensor = inventory.tensors[name];
      if (tensor.is_null())
        tensor = {{"kind", part.at("kind")},
                  {"dtype", part.at("dtype")},
                  {"shape", part.at("shape")},
                  {"parts", json::object()}};
      tensor["parts"][fmt::format("{}", rank)] = hash;
      inventory.writers.insert(static_cast<int>(rank));
    }
  }
  inventory.id = hash_text(hash_of(std::as_bytes(std::span(told.data(), told.size()))));
  return inventory;
}

/// The tensors of a rank's file. The memory of ranges must outlive the call of the writer, so
/// tensors own it.
std::vector<NamedTensor> file_tensors(const std::vector<PackedPart>& parts,
                                      const Inventory& inventory, int rank) {
  std::vector<NamedTensor> tensors;
  const std::string own = fmt::format("{}", rank);
  for (const PackedPart& part : parts) {
    if (part.packed.numel() == 0 || !inventory.tensors.at(part.name).at("parts").contains(own))
      continue;
    if (part.ranges.size() == 1 && part.packed.numel() == numel_of(part.shape)) {
      tensors.push_back({part.name, part.packed.view(part.shape)});
      continue;
    }
    tensors.push_back({part.name, part.packed});
    at::Tensor ranges = at::empty({static_cast<std::int64_t>(part.ranges.size()), 2},
                                  at::TensorOptions().dtype(at::kLong));
    auto* out = ranges.mutable_data_ptr<std::int64_t>();
    for (const FlatRange& range : part.ranges) {
      *out++ = range.global_begin;
      *out++ = range.count;
    }
    tensors.push_back({ranges_name(part.name), ranges});
  }
  return tensors;
}

/// Runs `act` on this rank and reports its outcome to the others.
/// Errors   InfrastructureError on every rank if it failed on any; `undo` has been called then.
std::vector<json> all_or_none(Communicator& world, const std::function<json()>& act,
                              const std::function<void()>& undo) {
  json own = {{"error", ""}, {"result", nullptr}};
  try {
    own["result"] = act();
  } catch (const std::exception& error) {
    own["error"] = *error.what() == '\0' ? "it failed" : error.what();
  }
  std::vector<json> results;
  std::string problem;
  const std::vector<std::string> texts =
      gathered(world, own.dump(-1, ' ', false, json::error_handler_t::replace));
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const json told = json::parse(texts[rank]);
    const auto error = told.at("error").get<std::string>();
    if (!error.empty() && problem.empty())
      problem = fmt::format("the checkpoint was not written, rank {}: {}", rank, error);
    results.push_back(told.at("result"));
  }
  if (problem.empty()) return results;
  undo();
  throw InfrastructureError(problem);
}

/// Files of checkpoints, finished or not, that are not those of `id`.
void remove_others(const std::filesystem::path& folder, std::string_view id) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    const bool is_ours = name.starts_with("step") && name.find("-rank") != std::string::npos &&
                         name.find(".safetensors") != std::string::npos;
    const bool is_current =
        name.find(fmt::format("-{}-", id)) != std::string::npos && name.ends_with(".safetensors");
    if (is_ours && !is_current) std::filesystem::remove(entry.path(), ignored);
  }
}

std::string own_host_name() {
  std::array<char, 256> name{};
  (void)::gethostname(name.data(), name.size() - 1);
  return name.front() == '\0' ? "an unnamed host" : name.data();
}

/// What a rank says of the file that it has written.
json written_file(const std::filesystem::path& path) {
  return {{"name", path.filename().string()},
          {"sha256", sha256_hex_of_file(path)},
          {"host", own_host_name()}};
}

/// A manifest must not name what only another host has.
void require_seen(const std::filesystem::path& folder, const std::vector<json>& files,
                  const Inventory& inventory) {
  for (const int rank : inventory.writers) {
    const json& file = files.at(static_cast<std::size_t>(rank));
    const std::filesystem::path path = folder / file.at("name").get<std::string>();
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) {
      throw InfrastructureError(fmt::format(
          "{}: rank {} on {} has written this file, and rank 0 on {} does not see it; the folder "
          "(--save-checkpoint, --storage-path) must be one that all hosts share, and no other "
          "run's",
          path.string(), rank, file.at("host").get<std::string>(), own_host_name()));
    }
    const SafetensorsFile seen = SafetensorsFile::open(path);
    const auto id = seen.metadata().find("checkpoint");
    if (id != seen.metadata().end() && id->second == inventory.id) continue;
    throw InfrastructureError(fmt::format("{}: must be of checkpoint {}, got one of {}",
                                          path.string(), inventory.id,
                                          id == seen.metadata().end() ? "none" : id->second));
  }
}

json manifest_of(const RunProgress& progress, const Inventory& inventory,
                 const std::vector<json>& files, const Mesh& mesh) {
  json axes = json::array(), written = json::object();
  for (const AxisDegree& axis : mesh.shape().axes())
    axes.push_back({{"axis", name_of(axis.axis)}, {"degree", axis.degree}});
  for (const int rank : inventory.writers) {
    const json& file = files.at(static_cast<std::size_t>(rank));
    written[fmt::format("{}", rank)] = {{"name", file.at("name")}, {"sha256", file.at("sha256")}};
  }
  json manifest = {{"schema", 1},
                   {"id", inventory.id},
                   {"world_size", mesh.world().size()},
                   {"mesh", axes},
                   {"streams", inventory.streams},
                   {"optimizer", {{"rule", progress.rule}, {"updates", inventory.updates}}},
                   {"numbers", progress.numbers},
                   {"files", written},
                   {"tensors", inventory.tensors}};
  if (!progress.training.empty()) manifest["training"] = json::parse(progress.training);
  manifest["sha256"] = manifest_sha256(manifest);
  return manifest;
}

}  // namespace

std::vector<FlatRange> ranges_of(const Layout& layout, const Shape& local, const MeshShape& mesh,
                                 int rank) {
  if (is_flat(layout)) return flat_parts_of(layout, mesh, rank);
  return layout_of_run(layout, local, mesh, rank, 0, numel_of(local)).flat;
}

void CheckpointIo::write(const std::filesystem::path& folder, const RunProgress& progress,
                         const std::vector<SavedPart>& parts, Mesh& mesh) const {
  Communicator& world = mesh.world();
  std::vector<PackedPart> own;
  for (const SavedPart& part : parts) own.push_back(packed(part, mesh));
  const Inventory inventory = inventory_of(gathered(world, announcement(progress, own)));
  if (!inventory.problem.empty()) {
    const std::string what =
        fmt::format("{}: the checkpoint was not written: {}", folder.string(), inventory.problem);
    if (inventory.is_of_state) throw UnsavableState(what);
    throw InfrastructureError(what);
  }
  const std::filesystem::path path =
      folder / rank_file_name(progress.stream.next_step, inventory.id, mesh.rank());
  const bool writes = inventory.writers.contains(mesh.rank());
  // Of equal content: it is there already, whole, and must not go if writing it anew fails.
  std::error_code ignored;
  const bool was_there = std::filesystem::exists(path, ignored);
  const auto remove_own = [&] {
    if (writes && !was_there) std::filesystem::remove(path, ignored);
  };
  const std::vector<json> files = all_or_none(
      world,
      [&]() -> json {
        std::filesystem::create_directories(folder);
        if (!writes) return nullptr;
        write_safetensors(path, file_tensors(own, inventory, mesh.rank()),
                          {{"checkpoint", inventory.id},
                           {"rank", fmt::format("{}", mesh.rank())},
                           {"world_size", fmt::format("{}", world.size())}});
        return written_file(path);
      },
      remove_own);
  (void)all_or_none(
      world,
      [&]() -> json {
        if (mesh.rank() != 0) return nullptr;
        require_seen(folder, files, inventory);
        write_file_atomically(folder / kManifestName,
                              manifest_of(progress, inventory, files, mesh).dump(1) + "\n");
        remove_others(folder, inventory.id);
        return nullptr;
      },
      remove_own);
}

RunProgress CheckpointIo::progress(const Checkpoint& checkpoint, const Mesh& mesh) const {
  return checkpoint.progress(mesh.rank(), mesh.shape().world_size());
}

void CheckpointIo::read(const Checkpoint& checkpoint, std::string_view name, const Layout& layout,
                        const Mesh& mesh, at::Tensor local) const {
  const std::vector<FlatRange> ranges =
      ranges_of(layout, local.sizes().vec(), mesh.shape(), mesh.rank());
  if (dtype_of(local) == checkpoint.tensor(name).dtype) {
    checkpoint.read(name, ranges, local.view({-1}));
    return;
  }
  at::Tensor saved = at::zeros(
      local.sizes(), local.options().dtype(scalar_type_of(checkpoint.tensor(name).dtype)));
  checkpoint.read(name, ranges, saved.view({-1}));
  local.copy_(saved);
}

}  // namespace isoshard
