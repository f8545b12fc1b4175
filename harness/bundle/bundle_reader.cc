// SPDX-License-Identifier: Apache-2.0
/// Reading bundles of unknown origin: nothing is believed that the files do not show.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "core/base/error.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "harness/bundle/bundle.h"
#include "harness/bundle/bundle_files.h"
#include "harness/bundle/bundle_form.h"
#include "harness/bundle/bundle_json.h"
#include "harness/bundle/compared_json.h"
#include "harness/bundle/redrawn_json.h"
#include "harness/trace/parts.h"
#include "harness/trace/sampled.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct StepFiles {
  std::vector<Record> records;
  SafetensorsFile tensors;
  std::map<RecordKey, json> statistics;  ///< of records that their rank compared
};

class BundleReader {
 public:
  enum class Bytes : std::uint8_t { kCopied, kMapped };

  BundleReader(fs::path directory, Bytes bytes)
      : directory_(std::move(directory)), bytes_(bytes), files_(directory_) {}

  Bundle run() {
    const fs::path file = directory_ / "manifest.json";
    if (!fs::exists(file) && has_steps()) require_there(file);  // it is written last
    const json manifest = files_.json("manifest.json");
    detail::require_known_schema(manifest, file);
    if (bytes_ == Bytes::kCopied) files_ = detail::SealedFiles(directory_, manifest);
    run_id_ = detail::field<std::string>(manifest, "run", file);
    bundle_.run = run_id_;
    read_digest(manifest, file);
    Trace& trace = bundle_.trace;
    trace.subject = detail::text_field(manifest, "subject", file);
    trace.case_slug = detail::text_field(manifest, "case", file);
    trace.mesh = detail::mesh_of(detail::field<json>(manifest, "mesh", file), file);
    const Shape steps = detail::field<Shape>(manifest, "steps", file);
    bundle_.settings = manifest.contains("settings") ? manifest.at("settings").dump() : "{}";
    read_producer(manifest, file);
    read_not_recorded(manifest, file);
    require_complete(steps, trace.mesh.world_size());
    for (int rank = 0; rank < trace.mesh.world_size(); ++rank) read_rank(rank, steps);
    check_tiling();
    read_responses();
    read_redrawn();
    files_.check_rest();
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

  void read_producer(const json& manifest, const fs::path& file) {
    if (manifest.contains("versions")) {
      const json& versions = manifest.at("versions");
      if (!versions.is_object()) {
        detail::refuse_form(file,
                            fmt::format("the field \"versions\" must be an object, got a JSON {}",
                                        versions.type_name()));
      }
      for (const auto& [name, version] : versions.items())
        bundle_.versions[name] = detail::text_field(versions, name.c_str(), file);
    }
    if (!manifest.contains("producer")) return;
    const json& producer = manifest.at("producer");
    bundle_.producer = fmt::format("{} {}", detail::text_field(producer, "name", file),
                                   detail::text_field(producer, "version", file));
  }

  void read_not_recorded(const json& manifest, const fs::path& file) {
    if (!manifest.contains("not_recorded")) return;
    for (const json& entry : detail::field<json>(manifest, "not_recorded", file))
      bundle_.not_recorded.push_back(
          {detail::text_field(entry, "pattern", file), detail::text_field(entry, "why", file)});
  }

  /// What a run says that it was compared with, and what others say when this one was it.
  void read_digest(const json& manifest, const fs::path& file) {
    bundle_.compared_with = detail::compared_with_of(manifest, file);
    bundle_.filtered = detail::filtered_of(manifest, file);
    if (!manifest.contains("files") || !manifest.at("files").is_object()) return;
    bundle_.digest = detail::digest_of_manifest(manifest);
    const json& files = manifest.at("files");
    if (files.contains(detail::kResponsesFile))
      bundle_.responses_hash = detail::field<std::string>(files, detail::kResponsesFile, file);
  }

  static void require_there(const fs::path& file) {
    if (!fs::exists(file))
      throw Refused<InfrastructureError>(said(RuleId::kRunIncomplete, {{"file", file.string()}}));
  }

  static std::string stem_of(int rank, std::int64_t step) {
    return fmt::format("step{:04}/rank{:05}", step, rank);
  }

  /// Before anything is read: what is not there explains what does not fit.
  void require_complete(const Shape& steps, int world_size) const {
    for (const std::int64_t step : steps) {
      for (int rank = 0; rank < world_size; ++rank) {
        for (const char* suffix : {".done", ".json", ".safetensors"})
          require_there(files_.path_of(stem_of(rank, step) + suffix));
      }
    }
  }

  StepFiles read_step(int rank, std::int64_t step) {
    const std::string stem = stem_of(rank, step);
    const fs::path file = files_.path_of(stem + ".json");
    const fs::path tensors = files_.path_of(stem + ".safetensors");
    const std::string id = files_.text(stem + ".done");
    const json description = files_.json(stem + ".json");
    if (detail::field<int>(description, "schema", file) != detail::kSchema)
      refuse(file, RuleId::kOtherRun,
             {NamedValue::words("problem", "has another schema than manifest.json")});
    if (id != run_id_ + "\n" || detail::field<std::string>(description, "run", file) != run_id_)
      refuse(
          file, RuleId::kOtherRun,
          {NamedValue::words(
              "problem", fmt::format("belongs to another run than manifest.json ({})", run_id_))});
    if (detail::field<int>(description, "rank", file) != rank ||
        detail::field<std::int64_t>(description, "step", file) != step) {
      refuse(file, RuleId::kOtherRun,
             {NamedValue::words("problem", "holds another rank or step than its name says")});
    }
    StepFiles result{{}, files_.tensors(stem + ".safetensors"), {}};
    if (description.contains("journal"))
      bundle_.journals[{static_cast<int>(step), rank}] =
          journal_of(description.at("journal"), rank, bundle_.trace.mesh.world_size(), file);
    std::size_t kept = 0;
    detail::RecordDefaults defaults{.step = static_cast<int>(step)};
    for (const json& entry : detail::field<json>(description, "records", file)) {
      const RecordKey key = detail::key_of(entry, defaults, file);
      if (key.step != step)
        refuse(file, RuleId::kOtherRun,
               {NamedValue::words("problem", "holds a record of another step")});
      const bool is_kept = detail::field_or<bool>(entry, "kept", true, file);
      defaults.tensor = is_kept ? &result.tensors.info(detail::tensor_name(key)) : nullptr;
      Record record = detail::record_of(entry, defaults, file);
      ++defaults.position;
      if (record.kept) check_tensor(record, result.tensors);
      if (detail::is_inferred(entry, file)) bundle_.inferred.insert(key);
      if (!record.kept && entry.contains("compared")) {
        record.compared = true;
        result.statistics[key] = entry.at("compared");
        const std::string name = detail::sample_name(key);
        if (result.tensors.contains(name)) {
          read_sample(record, result.tensors, rank);
          ++kept;
        }
      }
      kept += record.kept ? 1 : 0;
      result.records.push_back(std::move(record));
    }
    if (kept != result.tensors.names().size())
      refuse(tensors, RuleId::kTensorsAsDescribed,
             {{"described", kept}, {"got", result.tensors.names().size()}});
    return result;
  }

  void read_sample(const Record& record, const SafetensorsFile& tensors, int rank) {
    const std::string name = detail::sample_name(record.key);
    const SafetensorsInfo& info = tensors.info(name);
    const std::size_t count =
        sampled_positions(run_id_, rank, record.key, numel_of(record.local_shape)).size();
    if (info.dtype != record.dtype || info.shape != Shape{static_cast<std::int64_t>(count)})
      detail::refuse_form(tensors.path(), fmt::format("{} must hold {} elements of {}", name, count,
                                                      name_of(record.dtype)));
    const std::span<const std::byte> bytes = tensors.bytes(name);
    bundle_.samples[{rank, record.key}] = {bytes.begin(), bytes.end()};
  }

  static void check_tensor(const Record& record, const SafetensorsFile& tensors) {
    const SafetensorsInfo& info = tensors.info(detail::tensor_name(record.key));
    if (info.dtype != record.dtype || info.shape != record.local_shape) {
      detail::refuse_form(tensors.path(),
                          fmt::format("{} must have the dtype and shape of its record",
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
    std::shared_ptr<Arena> arena;
    std::vector<std::int64_t> begins;
    if (bytes_ == Bytes::kMapped) {
      std::vector<fs::path> paths;
      for (const StepFiles& step : files) paths.push_back(step.tensors.path());
      arena = std::make_shared<Arena>(paths, begins);
    } else {
      arena = std::make_shared<Arena>(capacity, fmt::format("bundle-{}", rank));
    }
    std::set<RecordKey> seen;
    for (std::size_t i = 0; i < files.size(); ++i) {
      StepFiles& step = files[i];
      if (bytes_ == Bytes::kMapped) begin_ = begins[i];
      for (Record& record : step.records) {
        if (!seen.insert(record.key).second)
          refuse(step.tensors.path(), RuleId::kRecordedTwice, {{"tensor", describe(record.key)}});
        fill(record, step, rank, *arena);
        trace.records.push_back(std::move(record));
      }
    }
    arena->seal();
    trace.arena = arena;
    std::stable_sort(trace.records.begin(), trace.records.end(),
                     [](const Record& a, const Record& b) {
                       return std::pair(a.key.step, a.order) < std::pair(b.key.step, b.order);
                     });
    check_calls(trace);
    bundle_.trace.ranks.push_back(std::move(trace));
  }

  /// Whoever records a tensor again counts from 0 on.
  void check_calls(const RankTrace& rank) const {
    std::map<std::tuple<int, RecordKind, std::string>, int> next;
    for (const Record& record : rank.records) {
      const int expected = next[{record.key.step, record.key.kind, record.key.name}]++;
      if (record.key.call != expected)
        refuse(stem_of(rank.rank, record.key.step) + ".json", RuleId::kCallsNotCounted,
               {{"tensor", describe(record.key)}, {"got", record.key.call}, {"due", expected}});
    }
  }

  void fill(Record& record, const StepFiles& step, int rank, Arena& arena) const {
    const SafetensorsFile& tensors = step.tensors;
    if (bundle_.inferred.contains(record.key)) {
      keep(record, tensors, arena);
      return;
    }
    try {
      record.parts = parts_of(record, bundle_.trace.mesh, rank);
    } catch (const MeshError& error) {
      const std::string name = describe(record.key), problem = error.what();
      refuse(tensors.path(), RuleId::kLocalDoesNotFitLayout,
             {NamedValue::words("problem", problem.starts_with(name)
                                               ? problem
                                               : fmt::format("{}: {}", name, problem))});
    }
    if (record.compared) {
      detail::fill_statistics(record, step.statistics.at(record.key), tensors.path());
      return;
    }
    if (!record.kept) return;
    const std::span<const std::byte> bytes = keep(record, tensors, arena);
    if (bytes_ == Bytes::kMapped) return;
    std::vector<std::byte> scratch;
    for (PartStats& part : record.parts) {
      const std::int64_t numel = numel_of(part, is_flat(record.layout));
      if (numel == 0) continue;
      part.digest = digest_of(packed(record, part, bytes.data(), scratch),
                              static_cast<std::size_t>(numel) * size_of(record.dtype));
    }
  }

  std::span<const std::byte> keep(Record& record, const SafetensorsFile& tensors,
                                  Arena& arena) const {
    if (!record.kept) return {};
    const std::span<const std::byte> bytes = tensors.bytes(detail::tensor_name(record.key));
    record.bytes = static_cast<std::int64_t>(bytes.size());
    record.offset = bytes_ == Bytes::kCopied
                        ? arena.append(bytes)
                        : begin_ + (bytes.data() - tensors.file_bytes().data());
    return bytes;
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
        if (bundle_.inferred.contains(record.key)) continue;
        Parts& p = parts[record.key];
        if (!p.shape.empty() && p.shape != record.layout.global_shape)
          detail::refuse_form(
              directory_,
              fmt::format("{}: all ranks must give the same global shape", describe(record.key)));
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
        detail::refuse_form(
            directory_, fmt::format("{}: all ranks must give boxes, or all flat ranges, got both",
                                    describe(key)));
      const std::string problem =
          p.ranges.empty() ? tiling_problem(p.shape, p.boxes) : tiling_problem(p.shape, p.ranges);
      if (!problem.empty())
        refuse(directory_, RuleId::kPartsDoNotTile,
               {{"tensor", describe(key)}, NamedValue::words("problem", problem)});
    }
  }

  void read_responses() {
    constexpr const char* kFile = detail::kResponsesFile;
    if (!files_.contains(kFile)) return;
    bundle_.responses =
        detail::responses_of(files_.json(kFile), files_.path_of(kFile), bundle_.response_runs);
  }

  void read_redrawn() {
    constexpr const char* kFile = detail::kRedrawnFile;
    if (!files_.contains(kFile)) return;
    bundle_.redrawn = detail::redrawn_of(files_.json(kFile), files_.path_of(kFile));
    std::set<RecordKey> recorded;
    for (const RankTrace& rank : bundle_.trace.ranks) {
      for (const Record& record : rank.records) recorded.insert(record.key);
    }
    for (const auto& [key, sums] : bundle_.redrawn.sums) {
      if (!recorded.contains(key))
        detail::refuse_form(files_.path_of(kFile),
                            fmt::format("no rank recorded {}", describe(key)));
    }
  }

  fs::path directory_;
  Bytes bytes_;
  std::int64_t begin_ = 0;  ///< of the step's file, where files are mapped
  detail::SealedFiles files_;
  std::string run_id_;
  Bundle bundle_;
};

}  // namespace

Bundle read_bundle(const fs::path& directory) {
  return BundleReader(directory, BundleReader::Bytes::kCopied).run();
}

Bundle map_bundle(const fs::path& directory) {
  return BundleReader(directory, BundleReader::Bytes::kMapped).run();
}

}  // namespace isoshard
