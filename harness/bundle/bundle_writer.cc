// SPDX-License-Identifier: Apache-2.0
/// Writing bundles: tensors first, each rank's .done behind its files, the manifest last.
#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "core/io/safetensors.h"
#include "harness/bundle/bundle.h"
#include "harness/bundle/bundle_json.h"
#include "harness/bundle/redrawn_json.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Equal for equal runs: a digest of everything but the kept bytes' place.
std::string run_id_of(const Trace& trace) {
  std::uint64_t id =
      digest_of(reinterpret_cast<const std::byte*>(trace.subject.data()), trace.subject.size());
  id = digest_of(reinterpret_cast<const std::byte*>(trace.case_slug.data()), trace.case_slug.size(),
                 id);
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records) {
      const std::string text = detail::to_json(record).dump();
      id = digest_of(reinterpret_cast<const std::byte*>(text.data()), text.size(), id);
      for (const PartStats& part : record.parts)
        id = digest_of(reinterpret_cast<const std::byte*>(&part.digest), sizeof(part.digest), id);
    }
  }
  return fmt::format("{:016x}", id);
}

/// An empty folder, or an older bundle without its content. Links are never followed.
void prepare(const fs::path& directory) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(directory, error);
  if (fs::exists(status) && fs::is_symlink(status))
    throw UsageError(
        fmt::format("{} is a symbolic link; name the folder itself", directory.string()));
  fs::create_directories(directory, error);
  if (error)
    throw InfrastructureError(
        fmt::format("{}: cannot create the folder: {}", directory.string(), error.message()));
  if (fs::is_empty(directory, error)) return;
  if (!fs::is_regular_file(fs::symlink_status(directory / "manifest.json", error))) {
    throw UsageError(fmt::format("{} holds something that is not a bundle; give an empty folder",
                                 directory.string()));
  }
  fs::remove(directory / "manifest.json", error);
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("step") || name == "scalars.jsonl" || name == "responses.json" ||
        name == kRedrawnFile)
      fs::remove_all(entry.path(), error);
  }
  if (error)
    throw InfrastructureError(
        fmt::format("{}: cannot remove the older bundle: {}", directory.string(), error.message()));
}

void write_rank(const fs::path& folder, const std::string& run_id, const RankTrace& rank, int step,
                std::string& scalars) {
  std::error_code error;
  fs::create_directory(folder, error);
  if (error)
    throw InfrastructureError(
        fmt::format("{}: cannot create the folder: {}", folder.string(), error.message()));
  json records = json::array();
  std::vector<SafetensorsEntry> tensors;
  for (const Record& record : rank.records) {
    if (record.key.step != step) continue;
    records.push_back(detail::to_json(record));
    if (!record.kept) continue;
    const HostTensor tensor = rank.tensor(record);
    tensors.push_back(
        {detail::tensor_name(record.key), tensor.dtype, tensor.shape, [tensor] { return tensor; }});
    if (record.key.kind != RecordKind::kScalar) continue;
    json values = json::array();
    for (std::int64_t i = 0; i < tensor.numel(); ++i)
      values.push_back(to_hex(value_at(tensor.bytes.data(), tensor.dtype, i)));
    scalars += json({{"step", step},
                     {"rank", rank.rank},
                     {"name", record.key.name},
                     {"call", record.key.call},
                     {"values", values}})
                   .dump() +
               "\n";
  }
  const std::string stem = fmt::format("rank{:05}", rank.rank);
  write_safetensors(folder / (stem + ".safetensors"), tensors);
  write_file_atomically(folder / (stem + ".json"), json({{"schema", 1},
                                                         {"run", run_id},
                                                         {"rank", rank.rank},
                                                         {"step", step},
                                                         {"records", records}})
                                                           .dump() +
                                                       "\n");
  write_file_atomically(folder / (stem + ".done"), run_id + "\n");
}

void write(const fs::path& directory, const Trace& trace, const Reference* reference,
           std::string_view settings) {
  const json parsed = json::parse(settings, nullptr, false);
  if (!parsed.is_object()) throw UsageError("the settings of a bundle must be a JSON object");
  prepare(directory);
  const std::string run_id = run_id_of(trace);
  std::set<int> steps;
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records) steps.insert(record.key.step);
  }
  std::string scalars;
  for (const int step : steps) {
    for (const RankTrace& rank : trace.ranks)
      write_rank(directory / fmt::format("step{:04}", step), run_id, rank, step, scalars);
  }
  write_file_atomically(directory / "scalars.jsonl", scalars);
  if (reference != nullptr && reference->response_runs() > 0) {
    write_file_atomically(
        directory / "responses.json",
        detail::to_json(reference->responses(), reference->response_runs()).dump() + "\n");
  }
  if (reference != nullptr) write_redrawn(directory, reference->redrawn());
  const json manifest = {{"schema", 1},
                         {"run", run_id},
                         {"subject", trace.subject},
                         {"case", trace.case_slug},
                         {"mesh", detail::to_json(trace.mesh)},
                         {"steps", steps},
                         {"settings", parsed}};
  write_file_atomically(directory / "manifest.json", manifest.dump(1) + "\n");
}

}  // namespace

void write_bundle(const fs::path& directory, const Trace& trace, std::string_view settings) {
  write(directory, trace, nullptr, settings);
}

void write_bundle(const fs::path& directory, const Reference& reference,
                  std::string_view settings) {
  write(directory, reference.trace(), &reference, settings);
}

}  // namespace isoshard
