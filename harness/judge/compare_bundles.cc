// SPDX-License-Identifier: Apache-2.0
/// Comparing two runs on disk: the reference is put together, and the other run is recorded again.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/base/error.h"
#include "harness/bundle/bundle.h"
#include "harness/bundle/run_settings.h"
#include "harness/judge/compare_bundles.h"
#include "harness/judge/judge.h"
#include "harness/trace/assembled.h"
#include "harness/trace/record_writer.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

std::size_t bytes_needed(const RankTrace& rank) {
  std::size_t bytes = 64;
  for (const Record& record : rank.records) bytes += static_cast<std::size_t>(record.bytes) + 64;
  return bytes;
}

/// As if the run had been recorded against this reference.
Trace replayed(const Trace& trace, const Reference& reference, const JudgeOptions& judging,
               std::optional<bool> mask_small_gradients) {
  Trace result{trace.subject, trace.case_slug, trace.mesh, {}};
  for (const RankTrace& rank : trace.ranks) {
    RecordOptions options;
    options.mesh = trace.mesh;
    options.rank = rank.rank;
    options.reference = &reference;
    options.keep = Keep::kWhatDiffers;
    options.arena =
        std::make_shared<Arena>(bytes_needed(rank), fmt::format("replay-{}", rank.rank));
    options.k = judging.k;
    options.coarsest = judging.coarsest;
    const auto is_masked = [](const Record& record) { return record.unmasked >= 0; };
    options.mask_small_gradients = mask_small_gradients.value_or(
        std::any_of(rank.records.begin(), rank.records.end(), is_masked));
    RecordWriter writer(options);
    for (const Record& record : rank.records) {
      writer.begin_step(record.key.step);
      writer.write({record.key.kind, record.key.name, record.layout, record.grad_scale},
                   rank.tensor(record));
    }
    result.ranks.push_back(writer.finish());
  }
  return result;
}

/// The coarsest floating dtype of any record: what floors must allow for when nobody says.
Dtype coarsest_of(const Trace& trace, Dtype coarsest) {
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records) {
      if (unit_roundoff(record.dtype) > unit_roundoff(coarsest)) coarsest = record.dtype;
    }
  }
  return coarsest;
}

Dtype coarsest_of(const Bundle& reference, const RunSettings& reference_settings,
                  const Bundle& actual, const RunSettings& actual_settings) {
  const Dtype a =
      reference_settings.coarsest_dtype.value_or(coarsest_of(reference.trace, Dtype::kFloat64));
  const Dtype b =
      actual_settings.coarsest_dtype.value_or(coarsest_of(actual.trace, Dtype::kFloat64));
  return unit_roundoff(a) > unit_roundoff(b) ? a : b;
}

void refuse_different(const RunSettings& reference, const RunSettings& actual) {
  const std::vector<std::string> lines = differing_settings(reference, actual);
  if (lines.empty()) return;
  throw UsageError(
      fmt::format("the runs have different settings, so they cannot be expected to agree (allow it "
                  "with --allow-different-settings):"
                  "\n  {}",
                  fmt::join(lines, "\n  ")));
}

}  // namespace

Verdict compare_bundles(const std::filesystem::path& reference_directory,
                        const std::filesystem::path& actual_directory, JudgeOptions options,
                        DifferentSettings different) {
  Bundle trusted = read_bundle(reference_directory);
  const Bundle judged = read_bundle(actual_directory);
  const RunSettings trusted_settings =
      parse_run_settings(trusted.settings, reference_directory / "manifest.json");
  const RunSettings judged_settings =
      parse_run_settings(judged.settings, actual_directory / "manifest.json");
  if (different == DifferentSettings::kRefused) refuse_different(trusted_settings, judged_settings);
  options.coarsest = coarsest_of(trusted, trusted_settings, judged, judged_settings);
  if (judged_settings.activation_grad_scale)
    options.activation_grad_scale = judged_settings.activation_grad_scale;
  std::optional<bool> mask = judged_settings.mask_small_gradients
                                 ? judged_settings.mask_small_gradients
                                 : trusted_settings.mask_small_gradients;

  Reference reference(trusted.trace.mesh.world_size() == 1 ? std::move(trusted.trace)
                                                           : assembled(trusted.trace));
  if (trusted.response_runs > 0) {
    reference.set_responses(std::move(trusted.responses), trusted.response_runs);
  } else {
    // Without responses nothing says which gradients are small, and all must be equal.
    mask = false;
    if (!options.rtol.has_value()) options.level = Level::kExact;
  }
  return judge(reference, replayed(judged.trace, reference, options, mask), options);
}

}  // namespace isoshard
