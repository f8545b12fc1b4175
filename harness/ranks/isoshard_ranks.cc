// SPDX-License-Identifier: Apache-2.0
/// The C interface: a record writer that keeps nothing itself, over a reference that is mapped.
#include "harness/ranks/isoshard_ranks.h"

#include <fmt/format.h>

#include <cstring>
#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "core/io/json.h"
#include "harness/bundle/bundle.h"
#include "harness/bundle/bundle_json.h"
#include "harness/bundle/compared_json.h"
#include "harness/judge/saved_run.h"
#include "harness/trace/parts.h"
#include "harness/trace/record_writer.h"
#include "harness/trace/sampled.h"
#include "harness/trace/wanted_record.h"

using isoshard::Record;
using isoshard::RecordKind;
using nlohmann::json;

namespace {

constexpr const char* kRecord = "record";  // what errors call a text that is no file

isoshard::Reference mapped_reference(isoshard::Bundle& bundle, const std::string& folder) {
  if (bundle.trace.mesh.world_size() > 1)
    throw isoshard::UsageError(fmt::format(
        "a run is compared in its ranks with a reference of one process, got {} with {} ranks",
        folder, bundle.trace.mesh.world_size()));
  isoshard::Reference reference(std::move(bundle.trace));
  if (bundle.response_runs > 0)
    reference.set_responses(std::move(bundle.responses), bundle.response_runs);
  return reference;
}

/// The elements at these places, one after the other.
std::vector<std::byte> picked(const void* data, std::size_t element,
                              const std::vector<std::int64_t>& positions) {
  std::vector<std::byte> samples(positions.size() * element);
  for (std::size_t i = 0; i < positions.size(); ++i)
    std::memcpy(
        samples.data() + i * element,
        static_cast<const std::byte*>(data) + static_cast<std::size_t>(positions[i]) * element,
        element);
  return samples;
}

std::string& message_of_open() {
  thread_local std::string message;
  return message;
}

}  // namespace

struct isoshard_ranks {
  explicit isoshard_ranks(const json& options)
      : folder(isoshard::detail::field<std::string>(options, "reference", kRecord)),
        run(isoshard::detail::field<std::string>(options, "run", kRecord)),
        rank(isoshard::detail::field<int>(options, "rank", kRecord)),
        bundle(isoshard::map_bundle(folder)),
        settings(isoshard::parse_run_settings(bundle.settings,
                                              std::filesystem::path(folder) / "manifest.json")),
        reference(mapped_reference(bundle, folder)) {
    const auto purpose = isoshard::detail::field<std::string>(options, "purpose", kRecord);
    if (purpose != "judged" && purpose != "response")
      throw isoshard::UsageError(
          fmt::format("the purpose must be judged or response, got {}", purpose));
    isoshard::RecordOptions writing;
    writing.mesh =
        isoshard::detail::mesh_of(isoshard::detail::field<json>(options, "mesh", kRecord), kRecord);
    writing.rank = rank;
    writing.reference = &reference;
    writing.decides_only = true;
    is_judged = purpose == "judged";
    writing.keep = is_judged ? isoshard::Keep::kWhatDiffers : isoshard::Keep::kNothing;
    writing.policy = isoshard::recording_policy(settings, reference.trace());
    writing.purpose = is_judged ? isoshard::RunPurpose::kJudged : isoshard::RunPurpose::kResponse;
    mesh = writing.mesh;
    compared_with = json({{"digest", bundle.digest}, {"responses", bundle.responses_hash}}).dump();
    writer.emplace(std::move(writing));
  }

  Record parsed(const char* text, std::size_t bytes) const {
    const json j = isoshard::parse_json(text, kRecord);
    Record record = isoshard::detail::record_of(j, {}, kRecord);
    if (isoshard::detail::is_inferred(j, kRecord))
      throw isoshard::UsageError("the layout of a record that is compared must be known");
    const auto needed = static_cast<std::size_t>(isoshard::numel_of(record.local_shape)) *
                        isoshard::size_of(record.dtype);
    if (needed != bytes)
      throw isoshard::UsageError(fmt::format("{} must have {} bytes, got {}",
                                             isoshard::describe(record.key), needed, bytes));
    return record;
  }

  const char* compare(const char* text, const void* data, std::size_t bytes) {
    Record record = parsed(text, bytes);
    if (record.key.step != step) writer->begin_step(record.key.step);
    step = record.key.step;
    writer->write({record.key.kind, record.key.name, record.layout, record.grad_scale},
                  {record.dtype, record.local_shape, {static_cast<const std::byte*>(data), bytes}});
    const Record& own = writer->last();
    if (own.key.call != record.key.call)
      throw isoshard::UsageError(
          fmt::format("calls must be compared in ascending order, got {} where {} is due",
                      isoshard::describe(record.key), own.key.call));
    json j = {{"keep", must_keep(own)}, {"compared", isoshard::detail::statistics_json(own)}};
    if (own.unmasked >= 0) j["unmasked"] = own.unmasked;
    samples = picked(
        data, isoshard::size_of(record.dtype),
        isoshard::sampled_positions(run, rank, record.key, isoshard::numel_of(record.local_shape)));
    result = j.dump();
    return result.c_str();
  }

  /// Beside what differs: what the judge accepts no statistics of, and what is small anyway.
  bool must_keep(const Record& record) const {
    if (!is_judged) return false;
    std::int64_t covered = 0;
    for (const isoshard::PartStats& part : record.parts)
      covered += isoshard::numel_of(part, isoshard::is_flat(record.layout));
    const std::int64_t numel = isoshard::numel_of(record.local_shape);
    return record.kept || numel <= isoshard::kLeastSampled || covered != numel ||
           isoshard::is_own_repetition(record.key) || reference.find(record.key) == nullptr;
  }

  const char* error(const char* text, const void* data, std::size_t bytes) {
    Record record = parsed(text, bytes);
    const auto wanted = isoshard::wanted_of(reference, record.key, {});
    if (!wanted.has_value() || wanted->record.layout.global_shape != record.layout.global_shape)
      throw isoshard::UsageError(
          fmt::format("the reference has no {} of this shape", isoshard::describe(record.key)));
    record.parts = isoshard::parts_of(record, mesh, rank);
    isoshard::Stats sum;
    std::vector<std::byte> scratch;
    for (isoshard::PartStats& part : record.parts) {
      if (isoshard::numel_of(part, isoshard::is_flat(record.layout)) == 0) continue;
      const std::byte* own =
          isoshard::packed(record, part, static_cast<const std::byte*>(data), scratch);
      isoshard::compare_part(part, record, own, reference.bytes(wanted->record),
                             wanted->record.dtype, wanted->record.grad_scale, nullptr);
      isoshard::merge(sum, part.stats);
    }
    const bool is_finite = sum.nan_actual + sum.inf_actual + sum.nonfinite_mismatch == 0;
    result = is_finite ? isoshard::to_hex(sum.sum_sq_diff) : "inf";
    return result.c_str();
  }

  std::string folder, run;
  int rank = 0;
  isoshard::Bundle bundle;  ///< without its trace and responses, which are the reference's
  isoshard::RunSettings settings;
  isoshard::Reference reference;
  isoshard::MeshShape mesh;
  bool is_judged = true;
  int step = -1;
  std::optional<isoshard::RecordWriter> writer;
  std::vector<std::byte> samples;
  std::string compared_with, result, message;
};

namespace {

/// Calls a member, and turns what it throws into a message.
template <class Function>
const char* guarded(isoshard_ranks* ranks, Function&& function) noexcept {
  if (ranks == nullptr) return nullptr;
  try {
    return function();
  } catch (const std::exception& error) {
    ranks->message = error.what();
  } catch (...) {
    ranks->message = "unknown error";
  }
  return nullptr;
}

}  // namespace

int isoshard_ranks_abi(void) {
  return ISOSHARD_RANKS_ABI;
}

isoshard_ranks* isoshard_ranks_open(const char* options) {
  try {
    if (options == nullptr) throw isoshard::UsageError("options must be given, got null");
    return new isoshard_ranks(isoshard::parse_json(options, "options"));
  } catch (const std::exception& error) {
    message_of_open() = error.what();
  } catch (...) {
    message_of_open() = "unknown error";
  }
  return nullptr;
}

void isoshard_ranks_close(isoshard_ranks* ranks) {
  delete ranks;
}

const char* isoshard_ranks_compared_with(isoshard_ranks* ranks) {
  return ranks == nullptr ? nullptr : ranks->compared_with.c_str();
}

const char* isoshard_ranks_compare(isoshard_ranks* ranks, const char* record, const void* data,
                                   size_t bytes) {
  return guarded(ranks, [&] {
    if (record == nullptr || (data == nullptr && bytes > 0))
      throw isoshard::UsageError("record and data must be given, got null");
    return ranks->compare(record, data, bytes);
  });
}

const char* isoshard_ranks_error(isoshard_ranks* ranks, const char* record, const void* data,
                                 size_t bytes) {
  return guarded(ranks, [&] {
    if (record == nullptr || (data == nullptr && bytes > 0))
      throw isoshard::UsageError("record and data must be given, got null");
    return ranks->error(record, data, bytes);
  });
}

const void* isoshard_ranks_samples(isoshard_ranks* ranks, size_t* bytes) {
  if (ranks == nullptr || bytes == nullptr) return nullptr;
  *bytes = ranks->samples.size();
  return ranks->samples.data();
}

const char* isoshard_ranks_message(const isoshard_ranks* ranks) {
  return ranks == nullptr ? message_of_open().c_str() : ranks->message.c_str();
}
