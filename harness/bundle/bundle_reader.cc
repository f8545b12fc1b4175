// SPDX-License-Identifier: Apache-2.0
/// Reading bundles of unknown origin: nothing is believed that the files do not show.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "harness/bundle/bundle.h"
#include "harness/bundle/bundle_json.h"
#include "harness/bundle/redrawn_json.h"
#include "harness/trace/parts.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr JsonLimits kLimits{
    .max_bytes = std::size_t{1} << 30, .max_depth = 16, .max_values = std::size_t{1} << 24};

[[noreturn]] void refuse(const fs::path& file, std::string_view what) {
  throw FileError(fmt::format("{}: {}", file.string(), what));
}

struct StepFiles {
  std::vector<Record> records;
  SafetensorsFile tensors;
};

class BundleReader {
 public:
  explicit BundleReader(fs::path directory) : directory_(std::move(directory)) {}

  Bundle run() {
    const fs::path file = directory_ / "manifest.json";
    if (!fs::exists(file) && has_steps()) require_there(file);  // it is written last
    const json manifest = read_json_file(file, kLimits);
    if (detail::field<int>(manifest, "schema", file) != 1) refuse(file, "only schema 1 is known");
    run_id_ = detail::field<std::string>(manifest, "run", file);
    Trace& trace = bundle_.trace;
    trace.subject = detail::text_field(manifest, "subject", file);
    trace.case_slug = detail::text_field(manifest, "case", file);
    trace.mesh = detail::mesh_of(detail::field<json>(manifest, "mesh", file), file);
    const Shape steps = detail::field<Shape>(manifest, "steps", file);
    bundle_.settings = manifest.contains("settings") ? manifest.at("settings").dump() : "{}";
    require_complete(steps, trace.mesh.world_size());
    for (int rank = 0; rank < trace.mesh.world_size(); ++rank) read_rank(rank, steps);
    check_tiling();
    read_responses();
    bundle_.redrawn = read_redrawn(directory_);
    return std::move(bundle_);
  }

 private:
  bool has_steps() const {
    std::error_code none;
    const fs::directory_iterator entries(directory_, none);
    return std::any_of(begin(entries), end(entries), [](const auto& entry) {
      return entry.path().filename().string().starts_with("step");
    });
  }

  static void require_there(const fs::path& file) {
    if (!fs::exists(file))
      throw InfrastructureError(fmt::format("{} is missing: the run is incomplete", file.string()));
  }

  std::string stem_of(int rank, std::int64_t step) const {
    return (directory_ / fmt::format("step{:04}", step) / fmt::format("rank{:05}", rank)).string();
  }

  /// Before anything is read: what is not there explains what does not fit.
  void require_complete(const Shape& steps, int world_size) const {
    for (const std::int64_t step : steps) {
      for (int rank = 0; rank < world_size; ++rank) {
        for (const char* suffix : {".done", ".json", ".safetensors"})
          require_there(stem_of(rank, step) + suffix);
      }
    }
  }

  StepFiles read_step(int rank, std::int64_t step) const {
    const std::string stem = stem_of(rank, step);
    const fs::path done = stem + ".done", file = stem + ".json", tensors = stem + ".safetensors";
    const MappedFile mapped(done);
    const std::string id(reinterpret_cast<const char*>(mapped.bytes().data()),
                         mapped.bytes().size());
    const json description = read_json_file(file, kLimits);
    if (detail::field<int>(description, "schema", file) != 1)
      refuse(file, "only schema 1 is known");
    if (id != run_id_ + "\n" || detail::field<std::string>(description, "run", file) != run_id_) {
      refuse(file, fmt::format("belongs to another run than manifest.json ({})", run_id_));
    }
    if (detail::field<int>(description, "rank", file) != rank ||
        detail::field<std::int64_t>(description, "step", file) != step) {
      refuse(file, "holds another rank or step than its name says");
    }
    StepFiles result{{}, SafetensorsFile::open(tensors)};
    std::size_t kept = 0;
    for (const json& entry : detail::field<json>(description, "records", file)) {
      Record record = detail::record_of(entry, file);
      if (record.key.step != step) refuse(file, "holds a record of another step");
      if (record.kept) check_tensor(record, result.tensors);
      kept += record.kept ? 1 : 0;
      result.records.push_back(std::move(record));
    }
    if (kept != result.tensors.names().size())
      refuse(tensors,
             fmt::format("{} tensors, {} are described", result.tensors.names().size(), kept));
    return result;
  }

  static void check_tensor(const Record& record, const SafetensorsFile& tensors) {
    const SafetensorsInfo& info = tensors.info(detail::tensor_name(record.key));
    if (info.dtype != record.dtype || info.shape != record.local_shape) {
      refuse(tensors.path(), fmt::format("{} has another dtype or shape than its record",
                                         detail::tensor_name(record.key)));
    }
  }

  void read_rank(int rank, const Shape& steps) {
    std::vector<StepFiles> files;
    std::size_t capacity = 64;
    for (const std::int64_t step : steps) {
      files.push_back(read_step(rank, step));
      for (const std::string& name : files.back().tensors.names())
        capacity += files.back().tensors.bytes(name).size() + 64;
    }
    RankTrace trace;
    trace.rank = rank;
    auto arena = std::make_shared<Arena>(capacity, fmt::format("bundle-{}", rank));
    std::set<RecordKey> seen;
    for (StepFiles& step : files) {
      for (Record& record : step.records) {
        if (!seen.insert(record.key).second)
          refuse(step.tensors.path(), fmt::format("{} stands twice", describe(record.key)));
        fill(record, step.tensors, rank, *arena);
        trace.records.push_back(std::move(record));
      }
    }
    arena->seal();
    trace.arena = arena;
    std::stable_sort(trace.records.begin(), trace.records.end(),
                     [](const Record& a, const Record& b) { return a.order < b.order; });
    bundle_.trace.ranks.push_back(std::move(trace));
  }

  void fill(Record& record, const SafetensorsFile& tensors, int rank, Arena& arena) const {
    try {
      record.parts = parts_of(record, bundle_.trace.mesh, rank);
    } catch (const MeshError& error) {
      const std::string name = describe(record.key), problem = error.what();
      refuse(tensors.path(),
             problem.starts_with(name) ? problem : fmt::format("{}: {}", name, problem));
    }
    if (!record.kept) return;
    const std::span<const std::byte> bytes = tensors.bytes(detail::tensor_name(record.key));
    record.bytes = static_cast<std::int64_t>(bytes.size());
    record.offset = arena.append(bytes);
    std::vector<std::byte> scratch;
    for (PartStats& part : record.parts) {
      const std::int64_t numel = numel_of(part, is_flat(record.layout));
      if (numel == 0) continue;
      part.digest = digest_of(packed(record, part, bytes.data(), scratch),
                              static_cast<std::size_t>(numel) * size_of(record.dtype));
    }
  }

  void check_tiling() const {
    struct Parts {
      Shape shape;
      std::vector<Box> boxes;
      std::vector<FlatRange> ranges;
    };
    std::map<RecordKey, Parts> parts;
    for (const RankTrace& rank : bundle_.trace.ranks) {
      for (const Record& record : rank.records) {
        Parts& p = parts[record.key];
        if (!p.shape.empty() && p.shape != record.layout.global_shape)
          refuse(directory_,
                 fmt::format("{}: ranks give different global shapes", describe(record.key)));
        p.shape = record.layout.global_shape;
        for (const PartStats& part : record.parts) {
          if (is_flat(record.layout)) {
            p.ranges.push_back(part.range);
          } else {
            p.boxes.push_back(part.box);
          }
        }
      }
    }
    for (const auto& [key, p] : parts) {
      if (!p.boxes.empty() && !p.ranges.empty())
        refuse(directory_,
               fmt::format("{}: boxes on one rank, flat ranges on another", describe(key)));
      const std::string problem =
          p.ranges.empty() ? tiling_problem(p.shape, p.boxes) : tiling_problem(p.shape, p.ranges);
      if (!problem.empty()) refuse(directory_, fmt::format("{}: {}", describe(key), problem));
    }
  }

  void read_responses() {
    const fs::path file = directory_ / "responses.json";
    if (fs::exists(file))
      bundle_.responses =
          detail::responses_of(read_json_file(file, kLimits), file, bundle_.response_runs);
  }

  fs::path directory_;
  std::string run_id_;
  Bundle bundle_;
};

}  // namespace

Bundle read_bundle(const fs::path& directory) {
  return BundleReader(directory).run();
}

}  // namespace isoshard
