// SPDX-License-Identifier: Apache-2.0
/// A trace on disk: the one serialisation, also the exchange format for external subjects.
///
///     manifest.json                   schema 2, run id, subject, case, mesh, steps, settings,
///     files scalars.jsonl                   every kept scalar, hex floats; for people and plots
///     responses.json                  a reference's responses, if it has any
///     redrawn.json                    a reference's redrawn runs, if it has any (redrawn_json.h)
///     step0003/rank00001.safetensors  the kept local tensors, named kind/name/call
///     step0003/rank00001.json         the records: layout, dtype, grad_scale
///     step0003/rank00001.done         the run id; written last, so that a broken run is seen
///
/// docs/reference/bundle.md describes every field for those who write a recorder of their own.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/bundle/journal.h"
#include "harness/trace/reference.h"

namespace isoshard {

/// What a bundle says it lacks. It excuses nothing by itself: the trusted side decides.
struct NotRecorded {
  std::string pattern;  ///< as matches_any takes it
  std::string why;
};

/// Which reference a run was compared with while it ran (docs/reference/bundle.md).
struct ComparedWith {
  std::string digest;     ///< Bundle::digest of the reference
  std::string responses;  ///< the SHA-256 of its responses.json; empty where there was none
};

/// What a filter left out of a recording. It excuses nothing by itself either.
struct Filtered {
  std::vector<std::string> only;    ///< patterns of what was recorded; empty: all names
  std::vector<std::int64_t> steps;  ///< that were recorded; empty: all
  std::int64_t records = 0;         ///< left out by name, over all ranks and steps
};

/// What a rank kept of a tensor that it compared: the elements at sampled_positions
/// (harness/trace/sampled.h), in the record's dtype.
using Samples = std::map<std::pair<int, RecordKey>, std::vector<std::byte>>;

struct Bundle {
  Trace trace;
  std::map<RecordKey, Response> responses;
  int response_runs = 0;
  Redrawn redrawn;
  std::string settings;  ///< JSON text, as given to write_bundle; "{}" if it has none
  std::map<std::string, std::string> versions;  ///< of the frameworks that ran
  std::string producer;  ///< "NAME VERSION" of the program that wrote it; may be empty
  std::vector<NotRecorded> not_recorded;
  Journals journals;  ///< of the ranks and steps that have one; not written by write_bundle
  std::string run;    ///< its id
  /// Of its run, settings, tensors and records, as its manifest lists them; not of responses.
  std::string digest;
  std::string responses_hash;  ///< SHA-256 of responses.json; empty if there is none
  std::optional<ComparedWith> compared_with;
  Samples samples;
  std::optional<Filtered> filtered;
  /// Records whose ranks do not say where their local tensors lie. Until infer_layouts
  /// (harness/judge/infer_layouts.h) has found it out, each is taken as a replica of its own shape,
  /// and has no parts.
  std::set<RecordKey> inferred;
};

/// Writes the run below `directory`, which may be missing, empty, or hold an older bundle, which is
/// replaced. `settings` is a JSON object that is stored as it is.
///
/// Errors   UsageError if the directory holds something else; InfrastructureError if writing fails.
void write_bundle(const std::filesystem::path& directory, const Trace& trace,
                  std::string_view settings = "{}");
void write_bundle(const std::filesystem::path& directory, const Reference& reference,
                  std::string_view settings = "{}");

/// Replaces the responses of a bundle that is there: responses.json, and what manifest.json lists
/// of it. Everything else stays.
///
/// Errors   FileError if the manifest is unreadable or of another schema; InfrastructureError if
/// writing
///          fails. A bundle whose writer is killed between the two files is refused when it is
///          read.
void write_responses(const std::filesystem::path& directory, const Reference& reference);

/// Guarantees   what comes back is bit-equal to what was written: records, layouts, kept bytes,
///              responses; no statistics. Every file is the one that manifest.json lists.
/// Errors       FileError for whatever is malformed, of another run, does not tile, has another
///              SHA-256, is not listed or is missing, for responses that do not fit each other or
///              their tensors, and for another schema; InfrastructureError that names the file when
///              the run is incomplete (the manifest is missing, or lists no files of a rank or
///              step).
[[nodiscard]] Bundle read_bundle(const std::filesystem::path& directory);

/// The same without copying tensors, and without holding files to their hashes: for a rank that
/// compares with a reference on its machine. Whoever judges reads the bundle again. Responses and
/// records are checked as ever. Digests of parts are 0.
[[nodiscard]] Bundle map_bundle(const std::filesystem::path& directory);

}  // namespace isoshard
