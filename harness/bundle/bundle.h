// SPDX-License-Identifier: Apache-2.0
/// A trace on disk: the one serialisation, also the exchange format for external subjects.
///
///     manifest.json                   schema 1, run id, subject, case, mesh, steps, settings
///     scalars.jsonl every kept scalar, hex floats; for people and plots, the tensors are what is
///       read
///     responses.json                  a reference's responses, if it has any
///     redrawn.json                    a reference's redrawn runs, if it has any (redrawn_json.h)
///     step0003/rank00001.safetensors  the kept local tensors, named kind/name/call
///     step0003/rank00001.json         the records: layout, dtype, grad_scale
///     step0003/rank00001.done         the run id; written last, so that a broken run is seen
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "harness/trace/reference.h"

namespace isoshard {

struct Bundle {
  Trace trace;
  std::map<RecordKey, Response> responses;
  int response_runs = 0;
  Redrawn redrawn;
  std::string settings;  ///< JSON text, as given to write_bundle
};

/// Writes the run below `directory`, which may be missing, empty, or hold an older bundle, which is
/// replaced. `settings` is a JSON object that is stored as it is.
///
/// Errors   UsageError if the directory holds something else; InfrastructureError if writing fails.
void write_bundle(const std::filesystem::path& directory, const Trace& trace,
                  std::string_view settings = "{}");
void write_bundle(const std::filesystem::path& directory, const Reference& reference,
                  std::string_view settings = "{}");

/// Guarantees   what comes back is bit-equal to what was written: records, layouts, kept bytes,
///              responses; no statistics.
/// Errors       FileError for whatever is malformed, of another run, or does not tile;
///              InfrastructureError that names the file when the run is incomplete (a rank, or a
///              rank's .done, is missing).
[[nodiscard]] Bundle read_bundle(const std::filesystem::path& directory);

}  // namespace isoshard
