// SPDX-License-Identifier: Apache-2.0
/// Causes that show beside what the same run recorded before it was saved and loaded.
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/observe/layer_name.h"
#include "harness/causes/run_causes.h"

namespace isoshard::detail {
namespace {

using Digests = std::vector<std::uint64_t>;

Digests digests_of(const Record& record) {
  Digests digests;
  for (const PartStats& part : record.parts) digests.push_back(part.digest);
  return digests;
}

/// How often the parameters of a step are recorded in a run that is not loaded behind it: after the
/// step; in step 0 as read, too.
int usual_calls(int step) {
  return step == 0 ? 2 : 1;
}

/// Whether the state of a step was recorded once more behind it, when a new subject had loaded it.
bool is_loaded_behind(const RankTrace& rank, int step) {
  return std::any_of(rank.records.begin(), rank.records.end(), [&](const Record& record) {
    return record.key.step == step && record.key.kind == RecordKind::kParam &&
           record.key.call == usual_calls(step);
  });
}

/// "mlp.gate_proj" of "model.layers.1.mlp.gate_proj.weight.exp_avg"; outside of layers the
/// parameter's whole name.
std::string module_of(const std::string& name) {
  const std::string_view parameter = parse_record_name(RecordKind::kOptimizer, name).base;
  const std::optional<LayerInName> layer = layer_in(parameter);
  if (!layer.has_value() || layer->begin == 0 || layer->end == parameter.size())
    return std::string(parameter);
  const std::string_view in_layer = parameter.substr(layer->end + 1);
  return std::string(in_layer.substr(0, in_layer.rfind('.')));
}

std::string state_of(const std::string& name) {
  return std::string(parse_record_name(RecordKind::kOptimizer, name).state);
}

/// Every parameter of the step is on every rank what it was before it was saved.
bool parameters_are_right(const Trace& run, int step) {
  for (const RankTrace& rank : run.ranks) {
    for (const Record& record : rank.records) {
      if (record.key.step != step || record.key.kind != RecordKind::kParam ||
          record.key.call != usual_calls(step))
        continue;
      RecordKey saved = record.key;
      --saved.call;
      const Record* before = rank.find(saved);
      if (before == nullptr || digests_of(*before) != digests_of(record)) return false;
    }
  }
  return true;
}

Cause cause_of_owner(const Evidence& e, const RecordKey& saved, const std::string& owner,
                     bool is_swapped) {
  const std::string state = state_of(saved.name);
  NamedValues values = {{"state", state.starts_with("exp_avg") ? "moments" : state},
                        {"module", module_of(saved.name)},
                        {"other", module_of(owner)},
                        {"parameter", parent_of(saved.name)},
                        {"other_parameter", parent_of(owner)}};
  const bool is_right = parameters_are_right(e.actual, saved.step);
  values.emplace_back("parameters_are_right", is_right);
  if (is_right)
    values.push_back(NamedValue::words("parameters_right", phrase(PhraseId::kParametersRight)));
  return make_cause(is_swapped ? CauseId::kOptimizerStatesSwapped : CauseId::kOptimizerStateOfOther,
                    std::move(values));
}

/// Whether what ranks hold of a loaded state is what `owner`'s was in the reference when it was
/// saved; `any` rank must have bytes.
bool holds_values_of(const Evidence& e, const RecordKey& loaded, const RecordKey& owner) {
  const Values right = e.reference_value(owner);
  bool any = false;
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* record = rank.find(loaded);
    if (record == nullptr || !record->kept || rank.arena == nullptr) continue;
    const Values flat = Values(rank.tensor(*record)).flattened();
    for (const PartStats& part : record->parts) {
      const bool is_run = is_flat(record->layout);
      if (!is_run && part.box.size != record->local_shape) return false;
      const Values wanted =
          is_run ? right.flattened().narrow(0, part.range.global_begin, part.range.count)
                 : right.cut(part.box.global_offset, part.box.size).flattened();
      const Values own = is_run ? flat.narrow(0, part.range.local_begin, part.range.count) : flat;
      if (!(distance(own, wanted) <= e.tolerance() * norm_of(wanted))) return false;
      any = any || own.numel() > 0;
    }
  }
  return any;
}

/// The same where ranks hold other pieces of the owner's than of this state: told by the
/// reference's values.
Cause owner_by_values(const Evidence& e, const RecordKey& saved) {
  for (const Record& other : e.reference.trace().ranks.at(0).records) {
    const bool may_own = other.key.step == saved.step && other.key.kind == saved.kind &&
                         other.key.call == saved.call && other.key.name != saved.name &&
                         state_of(other.key.name) == state_of(saved.name) &&
                         other.layout.global_shape == e.wanted.layout.global_shape;
    if (!may_own || !holds_values_of(e, e.wanted.key, other.key)) continue;
    RecordKey theirs = other.key;
    ++theirs.call;
    return cause_of_owner(e, saved, other.key.name, holds_values_of(e, theirs, saved));
  }
  return {};
}

/// State that was another state of the same parameter when it was saved.
Cause other_state(const Evidence& e, const RecordKey& saved) {
  const std::string parameter = parent_of(saved.name);
  for (const Record& other : e.reference.trace().ranks.at(0).records) {
    const bool may_be = other.key.step == saved.step && other.key.kind == saved.kind &&
                        other.key.call == saved.call && other.key.name != saved.name &&
                        parent_of(other.key.name) == parameter &&
                        other.layout.global_shape == e.wanted.layout.global_shape;
    if (may_be && holds_values_of(e, e.wanted.key, other.key))
      return make_cause(CauseId::kOptimizerStateOfOtherKind, {{"state", state_of(saved.name)},
                                                              {"parameter", parameter},
                                                              {"other", state_of(other.key.name)}});
  }
  return {};
}

/// Optimizer state that was another parameter's when it was saved.
Cause wrong_owner(const Evidence& e) {
  RecordKey saved = e.wanted.key;
  if (--saved.call < 0) return {};
  std::string owner;
  bool is_swapped = true;
  for (const int rank : e.bad_ranks()) {
    const Held* held = e.held_by(rank);
    const Record* own = held == nullptr ? nullptr : held->rank->find(saved);
    if (own == nullptr || digests_of(*own) == digests_of(*held->record)) return {};
    std::string found;
    for (const Record& other : held->rank->records) {
      const bool may_own = other.key.step == saved.step && other.key.kind == saved.kind &&
                           other.key.call == saved.call &&
                           state_of(other.key.name) == state_of(saved.name);
      if (!may_own || digests_of(other) != digests_of(*held->record)) continue;
      found = other.key.name;
      RecordKey loaded = other.key;
      ++loaded.call;
      const Record* theirs = held->rank->find(loaded);
      is_swapped = is_swapped && theirs != nullptr && digests_of(*theirs) == digests_of(*own);
      break;
    }
    if (found.empty() || (!owner.empty() && owner != found)) return owner_by_values(e, saved);
    owner = found;
  }
  return owner.empty() ? owner_by_values(e, saved) : cause_of_owner(e, saved, owner, is_swapped);
}

Cause state_of_another(const Evidence& e) {
  Cause cause = wrong_owner(e);
  RecordKey saved = e.wanted.key;
  return !cause.empty() || --saved.call < 0 ? cause : other_state(e, saved);
}

/// Of sorted ranks.
std::string masks_of(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return phrase(PhraseId::kMaskOfRankEquals, {{"rank", ranks.front()}});
  std::vector<int> row(ranks.size());
  std::iota(row.begin(), row.end(), ranks.front());
  if (ranks != row || ranks.size() == 2)
    return phrase(PhraseId::kMasksOfRanksEqual, {{"ranks", ranks}});
  return phrase(PhraseId::kMasksOfRowEqual, {{"first", ranks.front()}, {"last", ranks.back()}});
}

bool masks_were_right(const Trace& run, int before_step) {
  bool any = false;
  for (const RankTrace& rank : run.ranks) {
    for (const Record& record : rank.records) {
      if (record.key.kind != RecordKind::kMask || record.key.step >= before_step) continue;
      any = true;
      for (const PartStats& part : record.parts) {
        if (part.stats.unequal_values != 0) return false;
      }
    }
  }
  return any;
}

/// Masks of the first step behind a load that are all those of one right rank.
Cause stream_of_another_rank(const Evidence& e) {
  const std::vector<int>& bad = e.bad_ranks();
  for (const Held& right : e.held) {
    const bool is_right = std::find(bad.begin(), bad.end(), right.rank->rank) == bad.end();
    if (!is_right || !is_loaded_behind(*right.rank, e.wanted.key.step - 1)) continue;
    const bool explains = std::all_of(bad.begin(), bad.end(), [&](int rank) {
      const Held* held = e.held_by(rank);
      return held != nullptr && held->record->local_shape == right.record->local_shape &&
             digests_of(*held->record) == digests_of(*right.record);
    });
    if (!explains) continue;
    std::vector<int> sorted = bad;
    std::sort(sorted.begin(), sorted.end());
    NamedValues values = {{"ranks", sorted},
                          {"owner_rank", right.rank->rank},
                          NamedValue::words("masks", masks_of(sorted))};
    const bool were_right = masks_were_right(e.actual, e.wanted.key.step);
    values.emplace_back("was_right_before", were_right);
    if (were_right)
      values.push_back(NamedValue::words("right_before", phrase(PhraseId::kRightBeforeSaving)));
    return make_cause(CauseId::kMasksOfOtherRank, std::move(values));
  }
  return {};
}

/// Whether what the rank recorded before the record of this key was the reference's.
bool was_right_before(const Evidence& e, RecordKey key) {
  if (--key.call < 0 || e.reference.find(key) == nullptr) return false;
  const Values right = e.reference_value(key);
  return std::all_of(e.actual.ranks.begin(), e.actual.ranks.end(), [&](const RankTrace& rank) {
    const Record* record = rank.find(key);
    return record != nullptr &&
           std::all_of(record->parts.begin(), record->parts.end(),
                       [](const PartStats& part) { return part.stats.unequal_values == 0; });
  });
}

/// The steps by which a sampler is ahead of the reference's, or behind it.
Cause place_of_sampler(const Evidence& e, const View& bad) {
  for (const Record& other : e.reference.trace().ranks.at(0).records) {
    RecordKey here = e.wanted.key;
    here.step = other.key.step;
    const int ahead = other.key.step - e.wanted.key.step;
    if (other.key != here || ahead == 0) continue;
    const Values there = e.reference_value(other.key).cut(bad.box.global_offset, bad.box.size);
    if (!equal(there, bad.actual)) continue;
    return make_cause(ahead > 0 ? CauseId::kSamplerAhead : CauseId::kSamplerBehind,
                      {{"steps", std::abs(ahead)}});
  }
  return {};
}

}  // namespace

Cause cause_in_progress(const Evidence& e) {
  const View* bad = e.result.comparison.stage == Stage::kProgress && !e.views.empty()
                        ? e.first_bad_view()
                        : nullptr;
  if (bad == nullptr || bad->actual.numel() == 0) return {};
  const NameRole role = role_of(e.wanted.key);
  if (role == NameRole::kNext) return place_of_sampler(e, *bad);
  const Values actual = bad->actual.contiguous(), expected = bad->expected.contiguous();
  const auto seen = actual.flat(), wanted = expected.flat();
  NamedValues values;
  const bool is_resumed = e.wanted.key.call > 0;
  values.emplace_back("after_resume", is_resumed);
  if (is_resumed) values.push_back(NamedValue::words("when", phrase(PhraseId::kAfterResume)));
  const bool was_right = was_right_before(e, e.wanted.key);
  values.emplace_back("was_right_before", was_right);
  if (was_right)
    values.push_back(NamedValue::words("right_before", phrase(PhraseId::kRightBeforeSaving)));
  if (role == NameRole::kOptimizerSteps && seen.size() == 2) {
    values.emplace_back("counted", seen[0]);
    values.emplace_back("made", wanted[0]);
    return make_cause(CauseId::kUpdatesMiscounted, std::move(values));
  }
  if (role != NameRole::kRngState || seen.size() != 3) return {};
  if (seen[0] != wanted[0] || seen[1] != wanted[1])
    return make_cause(CauseId::kOtherMaskSeed, std::move(values));
  values.emplace_back("step", seen[2]);
  values.emplace_back("expected", wanted[2]);
  return make_cause(CauseId::kMasksOfOtherStep, std::move(values));
}

bool is_of_loading(const RecordKey& key) {
  return key.kind == RecordKind::kParam && key.call >= usual_calls(key.step);
}

Cause cause_in_loading(const Evidence& e) {
  if (e.wanted.key.kind == RecordKind::kOptimizer) return state_of_another(e);
  return e.wanted.key.kind == RecordKind::kMask ? stream_of_another_rank(e) : Cause();
}

}  // namespace isoshard::detail
