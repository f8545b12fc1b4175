// SPDX-License-Identifier: Apache-2.0
/// Reading a run, and putting a trusted one together.
#include "harness/judge/saved_run.h"

#include <optional>
#include <utility>

#include "core/base/error.h"
#include "harness/judge/assembled.h"
#include "harness/judge/bundle_rules.h"
#include "harness/judge/fitting_statistics.h"
#include "harness/stats/tolerance.h"
#include "harness/verdict/equal_runs.h"

namespace isoshard {

SavedRun::SavedRun(std::filesystem::path folder)
    : manifest(std::move(folder) / "manifest.json"),
      bundle(read_bundle(manifest.parent_path())),
      settings(parse_run_settings(bundle.settings, manifest)) {}

void SavedRun::refuse(RuleId id, NamedValues values) const {
  isoshard::refuse(manifest, id, std::move(values));
}

Dtype coarsest_dtype(const RunSettings& settings, const Trace& trace) {
  if (settings.coarsest_dtype.has_value()) return *settings.coarsest_dtype;
  Dtype coarsest = Dtype::kFloat64;
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records) {
      if (record.key.kind == RecordKind::kDataId) continue;  // nothing rounds inputs
      if (unit_roundoff(record.dtype) > unit_roundoff(coarsest)) coarsest = record.dtype;
    }
  }
  return coarsest;
}

JudgePolicy recording_policy(const RunSettings& settings, const Trace& reference) {
  JudgePolicy policy;
  policy.coarsest = coarsest_dtype(settings, reference);
  policy.mask = masks_small_gradients(settings);
  policy.step_rule = step_rule_of(settings);
  policy.max_grad_norm = settings.max_grad_norm.value_or(policy.max_grad_norm);
  return policy;
}

bool masks_small_gradients(const RunSettings& settings) {
  if (settings.mask_small_gradients.has_value()) return *settings.mask_small_gradients;
  const auto found = settings.training.find("optimizer.kind");
  return found != settings.training.end() && found->second.starts_with("\"adam");
}

Reference reference_of(SavedRun& trusted) {
  Trace& trace = trusted.bundle.trace;
  if (!trusted.bundle.inferred.empty())
    trusted.refuse(RuleId::kTrustedLayoutInferred,
                   {{"tensor", describe(*trusted.bundle.inferred.begin())}});
  require_kept(trace, trusted.manifest);
  if (has_statistics(trace)) trusted.refuse(RuleId::kTrustedStatistics);
  if (trace.mesh.world_size() > 1) {
    if (const std::optional<UnequalCopies> found = find_unequal_copies(trace)) {
      trusted.refuse(RuleId::kTrustedCopiesDiffer, {{"first_rank", found->first_rank},
                                                    {"second_rank", found->second_rank},
                                                    {"tensor", describe(found->key)}});
    }
    try {
      trace = assembled(trace);
    } catch (const MeshError& error) {
      trusted.refuse(RuleId::kTrustedPartsDoNotTile, {NamedValue::words("problem", error.what())});
    }
  }
  return Reference(std::move(trace));
}

Reference with_responses(Reference reference, SavedRun& trusted) {
  const int runs = trusted.bundle.response_runs;
  if (runs > 0) reference.set_responses(std::move(trusted.bundle.responses), runs);
  reference.set_redrawn(std::move(trusted.bundle.redrawn));
  require_fitting_responses(reference, masks_small_gradients(trusted.settings),
                            coarsest_dtype(trusted.settings, reference.trace()),
                            trusted.manifest.parent_path());
  return reference;
}

}  // namespace isoshard
