// SPDX-License-Identifier: Apache-2.0
/// Comparing two runs on disk: the reference is put together, and the other run is recorded again.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

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
Trace replayed(const Trace& trace, const Reference& reference, const JudgePolicy& policy) {
  Trace result{trace.subject, trace.case_slug, trace.mesh, {}};
  for (const RankTrace& rank : trace.ranks) {
    RecordOptions options;
    options.mesh = trace.mesh;
    options.rank = rank.rank;
    options.reference = &reference;
    options.keep = Keep::kWhatDiffers;
    options.arena =
        std::make_shared<Arena>(bytes_needed(rank), fmt::format("replay-{}", rank.rank));
    options.policy = policy;
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

/// One bundle and what it says of its run.
struct Saved {
  explicit Saved(const std::filesystem::path& directory)
      : bundle(read_bundle(directory)),
        settings(parse_run_settings(bundle.settings, directory / "manifest.json")) {}
  Bundle bundle;
  RunSettings settings;
};

/// What the trusted run says counts, then what the other one says, then what the records show. A
/// gradient scale is of the judged run: it has its own number of dp ranks.
JudgePolicy policy_of(const Saved& trusted, const Saved& judged, JudgePolicy policy) {
  const auto stated = [&](auto member, auto otherwise) {
    const auto &first = trusted.settings.*member, &second = judged.settings.*member;
    return first.has_value() ? *first : second.value_or(otherwise);
  };
  policy.coarsest = trusted.settings.coarsest_dtype.value_or(coarsest_of(
      trusted.bundle.trace,
      judged.settings.coarsest_dtype.value_or(coarsest_of(judged.bundle.trace, Dtype::kFloat64))));
  const auto is_masked = [](const Record& record) { return record.unmasked >= 0; };
  policy.mask = stated(&RunSettings::mask_small_gradients,
                       std::ranges::any_of(judged.bundle.trace.ranks, [&](const RankTrace& rank) {
                         return std::ranges::any_of(rank.records, is_masked);
                       }));
  policy.max_grad_norm = stated(&RunSettings::max_grad_norm, policy.max_grad_norm);
  const auto& names =
      trusted.settings.num_names.empty() ? judged.settings.num_names : trusted.settings.num_names;
  if (!names.empty()) policy.num_names = names;
  if (judged.settings.activation_grad_scale)
    policy.activation_grad_scale = judged.settings.activation_grad_scale;
  return policy;
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
                        const std::filesystem::path& actual_directory, JudgePolicy policy,
                        DifferentSettings different) {
  Saved trusted(reference_directory);
  const Saved judged(actual_directory);
  if (different == DifferentSettings::kRefused) refuse_different(trusted.settings, judged.settings);
  policy = policy_of(trusted, judged, std::move(policy));
  const int response_runs = trusted.bundle.response_runs;
  Reference reference(trusted.bundle.trace.mesh.world_size() == 1
                          ? std::move(trusted.bundle.trace)
                          : assembled(trusted.bundle.trace));
  reference.set_redrawn(std::move(trusted.bundle.redrawn));
  if (response_runs > 0) {
    reference.set_responses(std::move(trusted.bundle.responses), response_runs);
  } else if (!policy.rtol.has_value()) {
    policy.level = Level::kExact;
  }
  return judge(reference, replayed(judged.bundle.trace, reference, policy), policy);
}

}  // namespace isoshard
