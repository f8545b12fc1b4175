// SPDX-License-Identifier: Apache-2.0
/// Comparing two runs on disk: the reference is put together, and the other run is recorded again.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "core/mesh/mesh_words.h"
#include "harness/bundle/bundle.h"
#include "harness/bundle/run_calls.h"
#include "harness/bundle/run_settings.h"
#include "harness/judge/bundle_rules.h"
#include "harness/judge/compare_bundles.h"
#include "harness/judge/fitting_statistics.h"
#include "harness/judge/infer_layouts.h"
#include "harness/judge/journals/judge_journals.h"
#include "harness/judge/judge.h"
#include "harness/judge/records/claimed_shards.h"
#include "harness/judge/records/own_word.h"
#include "harness/judge/replay.h"
#include "harness/judge/saved_run.h"
#include "harness/trace/collective_calls.h"
#include "harness/trace/numbers.h"
#include "harness/trace/run_view.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

/// Of the dp axis, and of its halves.
int dp_degree(const MeshShape& mesh) {
  return mesh.degree(Axis::kDp) * mesh.degree(Axis::kDpReplicate) * mesh.degree(Axis::kDpShard);
}

/// The gradient scale that all records of a kind have, without the loss scale of their step; none
/// if there is no such record.
std::optional<double> own_scale(const SavedRun& trusted, const Reference& reference,
                                RecordKind kind) {
  std::optional<double> scale;
  for (const Record& record : reference.trace().ranks.at(0).records) {
    if (record.key.kind != kind || role_of(record.key) == NameRole::kMicroBatch) continue;
    const double loss_scale = kind == RecordKind::kActivationGrad
                                  ? RunView(reference).loss_scale(record.key.step).value_or(1)
                                  : 1;
    const double own = record.grad_scale / loss_scale;
    if (scale.has_value() && *scale != own)
      trusted.refuse(RuleId::kGradientScalesDiffer,
                     {{"kind", name_of(kind)}, {"first", *scale}, {"second", own}});
    scale = own;
  }
  return scale;
}

/// What a run of this mesh must declare on its activation gradients: what whoever compares says,
/// then what the trusted run says of runs judged against it, then what it did itself.
double demanded_scale(const SavedRun& trusted, const Reference& reference, const MeshShape& mesh,
                      const BundleRules& rules) {
  if (rules.grad_scale.has_value()) return *rules.grad_scale;
  const std::optional<double> own = own_scale(trusted, reference, RecordKind::kActivationGrad);
  if (mesh.world_size() > 1) {
    if (trusted.settings.activation_grad_scale_is_dp) return dp_degree(mesh);
    if (trusted.settings.activation_grad_scale) return *trusted.settings.activation_grad_scale;
  }
  return own.value_or(1);
}

/// Nothing in it comes from the judged run but the number of its ranks.
JudgePolicy policy_of(const SavedRun& trusted, const Reference& reference, const MeshShape& mesh,
                      const BundleRules& rules, JudgePolicy policy) {
  const RunSettings& settings = trusted.settings;
  policy.coarsest = coarsest_dtype(settings, reference.trace());
  policy.mask = masks_small_gradients(settings);
  policy.step_rule = step_rule_of(settings);
  // without it a step of an element that is left out could be of any size
  if (policy.mask && !policy.step_rule.has_value()) trusted.refuse(RuleId::kStepRuleMissing);
  policy.max_grad_norm = settings.max_grad_norm.value_or(policy.max_grad_norm);
  if (!settings.num_names.empty()) policy.num_names = settings.num_names;
  policy.activation_grad_scale = demanded_scale(trusted, reference, mesh, rules);
  policy.grad_scale =
      settings.grad_scale.value_or(own_scale(trusted, reference, RecordKind::kGrad).value_or(1));
  policy.partial = settings.partial.value_or(std::vector<std::string>());
  policy.partial->insert(policy.partial->end(), rules.partial.begin(), rules.partial.end());
  policy.not_recorded = rules.not_recorded;
  return policy;
}

/// Whether another program than ours wrote a bundle, and says which.
bool is_foreign(const Bundle& bundle) {
  return !bundle.producer.empty() && !bundle.producer.starts_with("isoshard ");
}

/// What else a run may be allowed whose batches come from a file that the trusted run may have
/// saved.
std::string_view hint_on_batch_file(const SavedRun& trusted, const SavedRun& judged,
                                    const BundleRules& rules) {
  const auto is_from_file = [&](BatchFileOf batch_file) {
    return is_from_batch_file(trusted.settings, judged.settings, batch_file);
  };
  return is_from_file(BatchFileOf::kEither) && !is_from_file(rules.batch_file)
             ? "\nThe judged run says that its batches come from a file, and nothing shows it; "
               "--allow-different-origins takes its word, and leaves out how samples were drawn"
             : "";
}

/// Notes about settings; refuses what is not allowed.
std::vector<std::string> check_settings(const SavedRun& trusted, const SavedRun& judged,
                                        const BundleRules& rules) {
  const bool is_allowed = rules.different == DifferentSettings::kAllowed;
  std::vector<std::string> notes;
  for (const SavedRun* saved : {&trusted, &judged}) {
    if (!saved->settings.training.empty()) continue;
    if (!is_allowed)
      saved->refuse(RuleId::kSettingsMissing,
                    {NamedValue::words("hint",
                                       ": runs of other settings cannot be expected to agree "
                                       "(allow it with --allow-different-settings)")});
    notes.push_back(
        fmt::format("the {} run states no training settings, as "
                    "--allow-different-settings allows",
                    saved == &trusted ? "trusted" : "judged"));
  }
  auto [lines, unshared] = setting_differences(trusted.settings, judged.settings, rules.batch_file);
  if (!is_foreign(trusted.bundle) && !is_foreign(judged.bundle)) {
    std::ranges::move(unshared, std::back_inserter(lines));
  } else if (!unshared.empty()) {
    notes.push_back(fmt::format("training settings that only one run says were not compared: {}",
                                fmt::join(unshared, "; ")));
  }
  if (lines.empty()) return notes;
  if (!is_allowed)
    throw Refused<UsageError>(
        said(RuleId::kSettingsDiffer,
             {{"settings", lines},
              NamedValue::words("differences", fmt::format("{}", fmt::join(lines, "\n  "))),
              NamedValue::words("hint", hint_on_batch_file(trusted, judged, rules))}));
  notes.push_back(
      fmt::format("the runs have different settings, as --allow-different-settings "
                  "allows: {}",
                  fmt::join(lines, "; ")));
  return notes;
}

/// The mesh is the judged run's own word, and it says how many parts a whole has.
void check_mesh(const SavedRun& judged, const BundleRules& rules) {
  const MeshShape& mesh = judged.bundle.trace.mesh;
  if (rules.mesh.has_value()) {
    for (int axis = 1; axis <= static_cast<int>(Axis::kDpShard); ++axis) {
      const auto wanted = static_cast<Axis>(axis);
      if (mesh.degree(wanted) != rules.mesh->degree(wanted))
        judged.refuse(RuleId::kOtherMesh, {{"axis", name_of(wanted)},
                                           {"degree", rules.mesh->degree(wanted)},
                                           {"got", mesh.degree(wanted)}});
    }
  }
  const auto stated = judged.settings.training.find("data.dp");
  if (mesh.world_size() == 1 || stated == judged.settings.training.end()) return;
  if (stated->second != std::to_string(dp_degree(mesh)))
    judged.refuse(RuleId::kMeshContradictsSettings,
                  {{"stated", stated->second}, {"dp", dp_degree(mesh)}});
}

/// The name of a dropout that is on, and its value.
std::optional<std::pair<std::string, double>> dropout_of(const RunSettings& settings) {
  for (const auto& [name, value] : settings.training) {
    const std::string last = name.substr(name.rfind('.') + 1);
    const bool is_dropout = last.find("dropout") != std::string::npos || last.ends_with("pdrop");
    const double p = is_dropout ? std::strtod(value.c_str(), nullptr) : 0;
    if (p > 0) return std::pair(name, p);
  }
  return std::nullopt;
}

void check_masks(const SavedRun& trusted) {
  const auto dropout = dropout_of(trusted.settings);
  if (!dropout.has_value()) return;
  for (const RankTrace& rank : trusted.bundle.trace.ranks) {
    if (std::ranges::any_of(rank.records, [](const Record& record) {
          return record.key.kind == RecordKind::kMask;
        }))
      return;
  }
  trusted.refuse(RuleId::kMasksMissing, {{"dropout", dropout->first}, {"p", dropout->second}});
}

/// Records of the judged run that the trusted one says it does not have, or that need not be there.
std::set<RecordKey> left_out(const SavedRun& trusted, const SavedRun& judged,
                             const Reference& reference, const BundleRules& rules) {
  std::vector<std::string> patterns = rules.not_recorded;
  for (const NotRecorded& entry : trusted.bundle.not_recorded) patterns.push_back(entry.pattern);
  std::set<RecordKey> keys;
  for (const RankTrace& rank : judged.bundle.trace.ranks) {
    for (const Record& record : rank.records) {
      if (reference.find(record.key) == nullptr && matches_any(patterns, record.key))
        keys.insert(record.key);
    }
  }
  return keys;
}

/// Who wrote a bundle, if it was no program of ours.
void add_producer(const Bundle& bundle, std::string_view whose, std::vector<std::string>& notes) {
  if (!is_foreign(bundle)) return;
  std::string text = fmt::format("the {} run was recorded by {}", whose, bundle.producer);
  for (const auto& [name, version] : bundle.versions) text += fmt::format(", {} {}", name, version);
  notes.push_back(std::move(text));
}

/// What the judged run says it lacks excuses nothing; it is passed on.
void add_claims(const SavedRun& judged, const BundleRules& rules, std::vector<std::string>& notes) {
  for (const NotRecorded& claim : judged.bundle.not_recorded) {
    const bool is_allowed =
        std::ranges::find(rules.not_recorded, claim.pattern) != rules.not_recorded.end();
    notes.push_back(fmt::format(
        "the judged run says that it does not record {} ({}){}", claim.pattern, claim.why,
        is_allowed ? "" : "; --not-recorded '" + claim.pattern + "' allows it"));
  }
}

/// Axes of one rank say nothing.
bool is_same_mesh(const MeshShape& a, const MeshShape& b) {
  const auto cut = [](const MeshShape& mesh) {
    std::vector<std::pair<Axis, int>> axes;
    for (const AxisDegree& axis : mesh.axes()) {
      if (axis.degree > 1) axes.emplace_back(axis.axis, axis.degree);
    }
    return axes;
  };
  return cut(a) == cut(b);
}

/// Holds the run to what the trusted side says that its ranks call: the table of its own subject on
/// this mesh. Another subject may call something else and be right.
void hold_to_calls(const SavedRun& trusted, const Trace& judged, JudgePolicy& policy,
                   std::vector<std::string>& notes) {
  const std::vector<RunCalls>& tables = trusted.settings.collectives;
  const auto found = std::ranges::find_if(tables, [&](const RunCalls& calls) {
    return calls.subject == judged.subject && is_same_mesh(calls.mesh, judged.mesh);
  });
  if (found != tables.end()) {
    // Runs of this program record what later forward passes read; of others nobody said so.
    if (!trusted.bundle.producer.starts_with("isoshard "))
      policy.not_recorded.push_back("param/" + to_string(RecordName{"*", NameRole::kReadAgain}));
    policy.collectives = table_of(*found);
  } else if (!tables.empty() && judged.mesh.world_size() > 1) {
    std::vector<std::string> there;
    for (const RunCalls& calls : tables)
      there.push_back(
          fmt::format("{} ({})", calls.subject, words_of(calls.mesh.axes(), "one process")));
    notes.push_back(fmt::format(
        "collectives were not judged: the trusted run has tables of {}, and this is a run of {} "
        "({})",
        fmt::join(there, ", "), judged.subject, words_of(judged.mesh.axes(), "one process")));
  }
}

/// Whether whoever compares wants this record of the trusted run.
bool is_wanted(const RecordKey& key, const BundleRules& rules) {
  if (key.kind == RecordKind::kDataId) return true;
  const bool is_read = key.kind == RecordKind::kParam && key.step == 0 && key.call == 0;
  const bool is_of_step = rules.steps.empty() || is_read ||
                          std::ranges::find(rules.steps, key.step) != rules.steps.end();
  return is_of_step && (rules.only.empty() || matches_any(rules.only, key));
}

/// A filter that fits nothing would leave a verdict over ids and first weights alone.
void require_filters_that_fit(const Reference& reference, const BundleRules& rules) {
  const std::vector<Record>& records = reference.trace().ranks.at(0).records;
  for (const std::string& pattern : rules.only) {
    if (std::ranges::none_of(
            records, [&](const Record& record) { return matches_any({pattern}, record.key); }))
      throw UsageError(fmt::format(
          "--only must fit a record of the trusted run, got '{}', which fits none", pattern));
  }
  for (const int step : rules.steps) {
    if (std::ranges::none_of(records,
                             [&](const Record& record) { return record.key.step == step; }))
      throw UsageError(fmt::format(
          "--at-steps must name steps of the trusted run, got {}, which it does not have", step));
  }
}

/// Lets the judge pass what whoever compares does not want. Returns words for the verdict line.
std::string add_filters(const SavedRun& trusted, const SavedRun& judged, const Reference& reference,
                        const BundleRules& rules, JudgePolicy& policy) {
  require_filters_that_fit(reference, rules);
  std::set<RecordKey> recorded;
  for (const RankTrace& rank : judged.bundle.trace.ranks) {
    for (const Record& record : rank.records) recorded.insert(record.key);
  }
  for (const Record& record : reference.trace().ranks.at(0).records) {
    if (!is_wanted(record.key, rules) && !recorded.contains(record.key))
      policy.left_out.insert(record.key);
  }
  std::vector<std::string> words;
  if (!policy.left_out.empty())
    words.push_back(fmt::format("{} records of the trusted run", policy.left_out.size()));
  for (const SavedRun* saved : {&trusted, &judged}) {
    if (!saved->bundle.filtered.has_value()) continue;
    const Filtered& filtered = *saved->bundle.filtered;
    std::string text = fmt::format("{} records that the {} run made no record of", filtered.records,
                                   saved == &trusted ? "trusted" : "judged");
    if (!filtered.only.empty()) text += fmt::format(" (only {})", fmt::join(filtered.only, ", "));
    if (!filtered.steps.empty())
      text += fmt::format(" (at steps {})", fmt::join(filtered.steps, ", "));
    words.push_back(std::move(text));
  }
  return words.empty() ? "" : fmt::format("filters left out {}", fmt::join(words, ", and "));
}

/// Where the sampler and the masks stand, which a run whose batches come from a file has not.
void leave_out_places_in_data(const SavedRun& judged, JudgePolicy& policy,
                              std::set<RecordKey>& extra, std::vector<std::string>& notes) {
  const std::vector<std::string> patterns = {"data_id/next_sample_ids", "scalar/rng_state"};
  policy.not_recorded.insert(policy.not_recorded.end(), patterns.begin(), patterns.end());
  for (const RankTrace& rank : judged.bundle.trace.ranks) {
    for (const Record& record : rank.records) {
      if (matches_any(patterns, record.key)) extra.insert(record.key);
    }
  }
  notes.emplace_back(
      "the batches of one run come from a file: where samplers and masks stand is not compared");
}

/// Adds what the journals of collectives show. Where values differ, too, the first of them stays
/// first.
void add_journals(JournalVerdict journals, Verdict& verdict) {
  std::vector<std::string>& notes = verdict.notes;
  notes.insert(notes.end(), journals.notes.begin(), journals.notes.end());
  if (!journals.summary.empty())
    verdict.collectives += (verdict.collectives.empty() ? "" : "; ") + journals.summary;
  const bool has_wrong_data =
      !verdict.findings.empty() && verdict.findings.front().stage == Stage::kDataIds;
  if (journals.findings.empty() || has_wrong_data) return;
  const Finding& first = journals.findings.front();
  const std::string words = first.what + on_ranks(first.ranks, verdict.mesh);
  if (verdict.status == Status::kDiverges) {
    verdict.reason += "; " + words;
  } else {
    set_diverges(verdict);
    verdict.reason = "first " + words;
  }
  for (Finding& finding : journals.findings) verdict.findings.push_back(std::move(finding));
}

}  // namespace

Verdict compare_bundles(const std::filesystem::path& reference_directory,
                        const std::filesystem::path& actual_directory, JudgePolicy policy,
                        const BundleRules& rules, Comparer* comparer) {
  SavedRun trusted(reference_directory);
  SavedRun judged(actual_directory);
  std::vector<std::string> notes = check_settings(trusted, judged, rules);
  check_mesh(judged, rules);
  check_masks(trusted);
  const Reference reference = with_responses(reference_of(trusted), trusted);
  policy = policy_of(trusted, reference, judged.bundle.trace.mesh, rules, std::move(policy));
  // Our own recorder stands behind all that a subject does to a gradient.
  policy.taps_may_differ = is_foreign(trusted.bundle) && is_foreign(judged.bundle);
  hold_to_calls(trusted, judged.bundle.trace, policy, notes);
  const std::string filters = add_filters(trusted, judged, reference, rules, policy);
  infer_layouts(judged.bundle, reference, policy, judged.manifest);
  require_honest_layouts(judged.bundle.trace, rules.not_recorded, judged.manifest,
                         policy.num_names);
  detail::require_consistent_shards(judged.bundle.trace, policy, rules.not_recorded,
                                    judged.manifest);
  if (reference.response_runs() == 0 && !policy.rtol.has_value()) policy.level = Level::kExact;
  std::set<RecordKey> extra = left_out(trusted, judged, reference, rules);
  if (!extra.empty())
    notes.push_back(
        fmt::format("{} records of the judged run are not in the trusted one, as "
                    "allowed, first {}",
                    extra.size(), describe(*extra.begin())));
  if (is_from_batch_file(trusted.settings, judged.settings, rules.batch_file))
    leave_out_places_in_data(judged, policy, extra, notes);
  add_claims(judged, rules, notes);
  add_producer(trusted.bundle, "trusted", notes);
  add_producer(judged.bundle, "judged", notes);
  const ComparedInRanks compared = require_fitting_statistics(trusted, judged, reference, policy);
  const auto tensor_of = [&](const RankTrace& rank, const Record& record) {
    return extra.contains(record.key) ? std::nullopt : std::optional(rank.tensor(record));
  };
  const Trace run =
      replayed(judged.bundle.trace, reference, policy, tensor_of, RunPurpose::kJudged, comparer);
  Verdict verdict = judge(reference, run, policy);
  verdict.notes.insert(verdict.notes.end(), notes.begin(), notes.end());
  if (!filters.empty()) verdict.reason += "; " + filters;
  if (compared.tensors > 0) {
    verdict.reason += "; " + words_of(compared);
    verdict.notes.push_back(note_of(compared));
  }
  tell_reductions(judged.bundle, verdict);
  add_journals(judge_journals(judged.bundle, reference, rules.not_recorded), verdict);
  add_own_word(trusted.settings, judged.settings, rules.batch_file, verdict);
  return verdict;
}

}  // namespace isoshard
