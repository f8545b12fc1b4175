// SPDX-License-Identifier: Apache-2.0
/// Writing bundles: tensors first, each rank's .done behind its files, the manifest last.
#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/atomic_file.h"
#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"
#include "harness/bundle/bundle.h"
#include "harness/bundle/bundle_files.h"
#include "harness/bundle/bundle_folder.h"
#include "harness/bundle/bundle_json.h"
#include "harness/bundle/redrawn_json.h"

#ifndef ISOSHARD_VERSION
#define ISOSHARD_VERSION "unknown"
#endif

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

void write_rank(detail::SealingWriter& files, const fs::path& directory, const std::string& run_id,
                const RankTrace& rank, int step, std::string& scalars) {
  const std::string folder = fmt::format("step{:04}", step);
  detail::make_bundle_folder(directory / folder);
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
  const std::string stem = fmt::format("{}/rank{:05}", folder, rank.rank);
  files.write(stem + ".safetensors", tensors);
  const json description = {{"schema", detail::kSchema},
                            {"run", run_id},
                            {"rank", rank.rank},
                            {"step", step},
                            {"records", records}};
  files.write(stem + ".json", description.dump() + "\n");
  files.write(stem + ".done", run_id + "\n");
}

void write_responses(detail::SealingWriter& files, const Reference& reference) {
  files.write(detail::kResponsesFile,
              detail::to_json(reference.responses(), reference.response_runs()).dump() + "\n");
}

void write(const fs::path& directory, const Trace& trace, const Reference* reference,
           std::string_view settings) {
  const json parsed = json::parse(settings, nullptr, false);
  if (!parsed.is_object()) throw UsageError("the settings of a bundle must be a JSON object");
  detail::prepare_bundle_folder(directory);
  detail::SealingWriter files(directory);
  const std::string run_id = run_id_of(trace);
  std::set<int> steps;
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records) steps.insert(record.key.step);
  }
  std::string scalars;
  for (const int step : steps) {
    for (const RankTrace& rank : trace.ranks)
      write_rank(files, directory, run_id, rank, step, scalars);
  }
  files.write("scalars.jsonl", scalars);
  if (reference != nullptr && reference->response_runs() > 0) write_responses(files, *reference);
  if (reference != nullptr && reference->redrawn().runs > 0)
    files.write(detail::kRedrawnFile, detail::to_json(reference->redrawn()).dump() + "\n");
  const json manifest = {{"schema", detail::kSchema},
                         {"run", run_id},
                         {"producer", {{"name", "isoshard"}, {"version", ISOSHARD_VERSION}}},
                         {"subject", trace.subject},
                         {"case", trace.case_slug},
                         {"mesh", detail::to_json(trace.mesh)},
                         {"steps", steps},
                         {"settings", parsed},
                         {"files", files.hashes()}};
  write_file_atomically(directory / "manifest.json", manifest.dump(1) + "\n");
  detail::finish_bundle_folder(directory);
}

}  // namespace

void write_bundle(const fs::path& directory, const Trace& trace, std::string_view settings) {
  write(directory, trace, nullptr, settings);
}

void write_bundle(const fs::path& directory, const Reference& reference,
                  std::string_view settings) {
  write(directory, reference.trace(), &reference, settings);
}

void write_responses(const fs::path& directory, const Reference& reference) {
  const fs::path path = directory / "manifest.json";
  json manifest = read_json_file(path);
  if (manifest.value("schema", 0) != detail::kSchema || !manifest.contains("files"))
    throw FileError(fmt::format("{}: responses are kept in bundles of schema {}", path.string(),
                                detail::kSchema));
  detail::SealingWriter files(directory);
  write_responses(files, reference);
  for (const auto& [name, hash] : files.hashes()) manifest["files"][name] = hash;
  write_file_atomically(path, manifest.dump(1) + "\n");
}

}  // namespace isoshard
