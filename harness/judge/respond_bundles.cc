// SPDX-License-Identifier: Apache-2.0
// Each perturbed run is recorded again against the reference, as runs of this program are as they
// run.
#include "harness/judge/respond_bundles.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <optional>
#include <set>
#include <string>

#include "core/base/error.h"
#include "harness/judge/bundle_rules.h"
#include "harness/judge/fitting_statistics.h"
#include "harness/judge/replay.h"
#include "harness/judge/saved_run.h"
#include "harness/stats/tolerance.h"

namespace isoshard {
namespace {

/// Of the same step as the reference, but for its weights.
void require_perturbed(const SavedRun& trusted, const SavedRun& perturbed,
                       const Reference& reference, const Trace& run, Dtype coarsest) {
  if (const std::vector<std::string> lines =
          differing_settings(trusted.settings, perturbed.settings, BatchFileOf::kEither);
      !lines.empty())
    throw Refused<UsageError>(
        perturbed.manifest,
        said(RuleId::kPerturbedSettingsDiffer,
             {{"settings", lines},
              NamedValue::words("differences", fmt::format("{}", fmt::join(lines, "\n  ")))}));
  const RankTrace& rank = run.ranks.at(0);
  std::set<RecordKey> recorded;
  const int first_step = rank.records.empty() ? 0 : rank.records.front().key.step;
  const double most = 2 * unit_roundoff(coarsest);  // an ulp, of the smallest number of a binade
  bool has_moved = false;
  for (const Record& record : rank.records) {
    recorded.insert(record.key);
    if (reference.find(record.key) == nullptr) continue;
    const Stats stats = stats_of(record);
    const bool is_initial = record.key.kind == RecordKind::kParam && record.key.call == 0 &&
                            record.key.step == first_step;
    has_moved = has_moved || (is_initial && stats.unequal_values > 0);
    const bool is_given =
        record.key.kind == RecordKind::kDataId || record.key.kind == RecordKind::kMask;
    if (is_given && stats.unequal_values > 0)
      perturbed.refuse(RuleId::kPerturbedDataDiffer, {{"tensor", describe(record.key)}});
    // zeros move to the smallest subnormal number
    const double allowed = most * std::sqrt(stats.sum_sq_reference) +
                           least_positive(coarsest) * std::sqrt(static_cast<double>(stats.numel));
    if (is_initial && std::sqrt(stats.sum_sq_diff) > allowed)
      perturbed.refuse(RuleId::kPerturbedTooFar, {{"allowed", most},
                                                  {"dtype", name_of(coarsest)},
                                                  {"moved", stats.relative_error()},
                                                  {"tensor", describe(record.key)}});
  }
  for (const Record& record : reference.trace().ranks.at(0).records) {
    if (!recorded.contains(record.key))
      perturbed.refuse(RuleId::kPerturbedRecordMissing, {{"tensor", describe(record.key)}});
  }
  if (!has_moved) perturbed.refuse(RuleId::kNotPerturbed);
}

void require_statistics_of_all(const SavedRun& perturbed) {
  for (const Record& record : perturbed.bundle.trace.ranks.at(0).records) {
    if (!record.compared)
      perturbed.refuse(RuleId::kPerturbedTensorBesideStatistics,
                       {{"tensor", describe(record.key)}});
  }
}

/// The perturbed run, compared with the reference: now, or by itself while it ran.
Trace compared_run(const SavedRun& trusted, SavedRun& perturbed, const Reference& reference,
                   const JudgePolicy& policy) {
  if (has_statistics(perturbed.bundle.trace)) {
    require_compared_with(trusted, perturbed);
    if (perturbed.bundle.trace.mesh.world_size() > 1)
      perturbed.refuse(RuleId::kPerturbedOnSeveralRanks);
    require_statistics_of_all(perturbed);
    return perturbed.bundle.trace;
  }
  const Reference whole = reference_of(perturbed);
  return replayed(
      whole.trace(), reference, policy,
      [](const RankTrace& rank, const Record& record) {
        return std::optional(rank.tensor(record));
      },
      RunPurpose::kResponse);
}

}  // namespace

std::size_t respond_bundles(const std::filesystem::path& reference_folder,
                            const std::vector<std::filesystem::path>& perturbed_folders) {
  if (perturbed_folders.empty())
    throw UsageError("responses need perturbed runs, got none; three are usual");
  std::set<std::filesystem::path> folders;
  for (const std::filesystem::path& folder : perturbed_folders) {
    if (!folders.insert(std::filesystem::weakly_canonical(folder)).second)
      throw UsageError(
          fmt::format("each perturbed run must be given once, got {} twice", folder.string()));
  }
  SavedRun trusted(reference_folder);
  Reference reference = reference_of(trusted);
  const JudgePolicy policy = recording_policy(trusted.settings, reference.trace());
  // No run sees the responses of others: it would mask by them.
  const Reference bare(reference.trace());
  for (const std::filesystem::path& folder : perturbed_folders) {
    SavedRun perturbed(folder);
    const Trace run = compared_run(trusted, perturbed, bare, policy);
    require_perturbed(trusted, perturbed, bare, run, policy.coarsest);
    reference.add_response(run);
  }
  require_fitting_responses(reference, policy.mask, policy.coarsest,
                            trusted.manifest.parent_path());
  write_responses(reference_folder, reference);
  return reference.responses().size();
}

}  // namespace isoshard
