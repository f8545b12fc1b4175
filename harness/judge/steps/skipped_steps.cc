// SPDX-License-Identifier: Apache-2.0
/// Steps whose gradients are not finite: what is still held against a run there, and what is said.
#include "harness/judge/steps/skipped_steps.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "harness/trace/numbers.h"
#include "harness/trace/parts.h"
#include "harness/trace/run_view.h"
#include "harness/trace/stage.h"

namespace isoshard::detail {
namespace {

struct Copy {
  int rank;
  const PartStats* part;
};

/// A part of the tensor, and which summand of it: the coordinates along the axes of a sum.
using Place = std::tuple<std::vector<int>, Shape, Shape, std::int64_t, std::int64_t>;

std::map<Place, std::vector<Copy>> copies_of(const Trace& run, const std::vector<Held>& held) {
  std::map<Place, std::vector<Copy>> copies;
  for (const Held& h : held) {
    const std::vector<int> summand = summand_of(h.record->layout, run.mesh, h.rank->rank);
    for (const PartStats& part : h.record->parts) {
      if (numel_of(part, is_flat(h.record->layout)) == 0) continue;
      copies[{summand, part.box.global_offset, part.box.size, part.range.global_begin,
              part.range.count}]
          .push_back({h.rank->rank, &part});
    }
  }
  return copies;
}

/// The ranks whose digest is not that of most copies; without a majority, not the first rank's.
void add_odd(const std::vector<Copy>& copies, std::set<int>& odd) {
  std::map<std::uint64_t, int> votes;
  for (const Copy& copy : copies) ++votes[copy.part->digest];
  const bool only_zeros_differ = std::ranges::all_of(copies, [](const Copy& copy) {
    return copy.part->stats.numel > 0 && copy.part->stats.unequal_values == 0;
  });
  if (votes.size() == 1 || only_zeros_differ) return;
  std::uint64_t usual = copies.front().part->digest;
  for (const Copy& copy : copies) {
    if (votes[copy.part->digest] > votes[usual]) usual = copy.part->digest;
  }
  for (const Copy& copy : copies) {
    if (copy.part->digest != usual) odd.insert(copy.rank);
  }
}

/// Of the gradients of one step, which are not finite.
struct Overflow {
  std::set<RecordKey> gradients, in_run, in_reference;
};

Overflow overflow_of(const Trace& run, int step) {
  Overflow found;
  for (const RankTrace& rank : run.ranks) {
    for (const Record& record : rank.records) {
      const RecordKey& key = record.key;
      if (key.step != step ||
          (key.kind != RecordKind::kGrad && key.kind != RecordKind::kActivationGrad))
        continue;
      const Stats stats = stats_of(record);
      found.gradients.insert(key);
      if (stats.nan_actual + stats.inf_actual > 0) found.in_run.insert(key);
      if (stats.nan_reference + stats.inf_reference > 0) found.in_reference.insert(key);
    }
  }
  return found;
}

}  // namespace

bool is_of_form(const Finding& finding) {
  return finding.id == FindingId::kPartsDoNotTile || finding.id == FindingId::kDtypesOfRanksDiffer;
}

std::optional<Finding> differing_copies(const RecordKey& key, const Trace& run,
                                        const std::vector<Held>& held) {
  std::set<int> odd;
  for (const auto& [place, copies] : copies_of(run, held)) add_odd(copies, odd);
  if (odd.empty()) return std::nullopt;
  Finding finding =
      make_finding(key, FindingId::kCopiesOfSkippedStepDiffer, {}, {{"odd_ranks", odd}});
  finding.ranks.assign(odd.begin(), odd.end());
  return finding;
}

Finding far_from_overflow(const RecordKey& key, const std::vector<Held>& held,
                          NamedValues measured) {
  Finding finding = make_finding(key, FindingId::kNotFinite, {}, std::move(measured));
  for (const Held& h : held) {
    const Stats stats = stats_of(*h.record);
    if (stats.nan_actual + stats.inf_actual > 0) finding.ranks.push_back(h.rank->rank);
  }
  finding.confirmed = true;
  return finding;
}

std::string words_of_no_step(const Reference& reference) {
  std::set<int> flagged;
  for (const Record& record : reference.trace().ranks.at(0).records) {
    if (role_of(record.key) == NameRole::kFoundInf) flagged.insert(record.key.step);
  }
  if (flagged.empty() ||
      !std::ranges::all_of(flagged, [&](int step) { return RunView(reference).is_skipped(step); }))
    return "";
  return "every step was skipped, as gradients are not finite: no step of the optimizer was judged";
}

bool has_whole_step_before(const Reference& reference, int step) {
  const std::vector<Record>& records = reference.trace().ranks.at(0).records;
  return std::ranges::any_of(records, [&](const Record& record) {
    if (record.key.step >= step || role_of(record.key) != NameRole::kFoundInf) return false;
    return !is_nonzero(reference.tensor(record.key));
  });
}

Rule rule_of_parting(const Trace& run, int step) {
  const Overflow overflow = overflow_of(run, step);
  return said(RuleId::kOverflowParts, {{"run", overflow.in_run.size()},
                                       {"gradients", overflow.gradients.size()},
                                       {"step", step},
                                       {"reference", overflow.in_reference.size()}});
}

std::string note_on_skipped(std::int64_t compared, std::int64_t excused, const std::string& first) {
  return fmt::format(
      "{} tensor{} compared; {} of skipped steps {} not, as {} not finite in one of the runs, "
      "first {}",
      compared, compared == 1 ? " was" : "s were", excused, excused == 1 ? "was" : "were",
      excused == 1 ? "it is" : "they are", first);
}

}  // namespace isoshard::detail
