// SPDX-License-Identifier: Apache-2.0
// Digests of repetitions, and calls against their table.
#include "harness/judge/own_records.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/error.h"
#include "core/mesh/mesh_words.h"
#include "harness/ids/cause.h"
#include "harness/trace/collective_calls.h"
#include "harness/trace/numbers.h"
#include "harness/trace/parts.h"
#include "harness/trace/run_view.h"
#include "harness/trace/stage.h"

namespace isoshard {
namespace {

using OwnPlace = std::tuple<Shape, Shape, std::int64_t, std::int64_t>;
using Digests = std::map<OwnPlace, std::set<std::uint64_t>>;
using Index = std::map<RecordKey, const Record*>;

void add_digests(const Record& record, Digests& digests) {
  const bool flat = is_flat(record.layout);
  for (const PartStats& part : record.parts) {
    if (numel_of(part, flat) == 0) continue;
    const OwnPlace place = flat ? OwnPlace{{}, {}, part.range.global_begin, part.range.count}
                                : OwnPlace{part.box.global_offset, part.box.size, 0, 0};
    digests[place].insert(part.digest);
  }
}

Digests digests_of(const Record& record) {
  Digests digests;
  add_digests(record, digests);
  return digests;
}

class OwnJudge {
 public:
  OwnJudge(const Trace& run, const JudgePolicy& policy) : run_(run), policy_(policy) {
    for (const RankTrace& rank : run_.ranks) {
      Index& index = indices_.emplace_back();
      for (const Record& record : rank.records) index.emplace(record.key, &record);
    }
  }

  OwnRecords judge() {
    std::map<RecordKey, std::vector<int>> wrong;
    for (std::size_t r = 0; r < run_.ranks.size(); ++r) {
      for (const Record& record : run_.ranks[r].records) {
        if (!is_own_repetition(record.key)) continue;
        ++result_.repetitions;
        if (role_of(record.key) != NameRole::kReadAgain)
          recomputed_[record.key.step].insert(record.key);
        if (!repeats(record, indices_[r])) wrong[record.key].push_back(run_.ranks[r].rank);
      }
    }
    for (auto& [key, ranks] : wrong) {
      const bool is_read = role_of(key) == NameRole::kReadAgain;
      add(make_finding(key,
                       is_read ? FindingId::kReadsOtherParameter : FindingId::kRecomputedOtherwise),
          std::move(ranks));
      if (is_read)
        diagnose_read(result_.findings.back());
      else
        explain(make_cause(CauseId::kRecomputedActivationsDiffer,
                           {{"wrong", count_recomputed(wrong, key.step)},
                            {"all", recomputed_.at(key.step).size()}}));
    }
    if (policy_.collectives) require_read_again();
    judge_collectives();
    return std::move(result_);
  }

 private:
  static std::int64_t count_recomputed(const std::map<RecordKey, std::vector<int>>& wrong,
                                       int step) {
    return std::ranges::count_if(wrong, [step](const auto& entry) {
      return entry.first.step == step && role_of(entry.first) != NameRole::kReadAgain;
    });
  }

  /// Subjects with a table are ours, and record what forward reads from their second step on.
  void require_read_again() {
    std::set<int> steps;
    std::map<RecordKey, std::set<int>> read, expected;  // and by which ranks
    for (const RankTrace& rank : run_.ranks) {
      for (const Record& record : rank.records) {
        const RecordKey& key = record.key;
        if (key.kind == RecordKind::kGrad) steps.insert(key.step);
        if (record.parts.empty()) continue;
        if (role_of(key) == NameRole::kReadAgain)
          read[key].insert(rank.rank);
        else if (key.kind == RecordKind::kParam)
          expected[{key.step + 1, RecordKind::kParam,
                    to_string(RecordName{key.name, NameRole::kReadAgain}), 0}]
              .insert(rank.rank);
      }
    }
    for (const auto& [key, ranks] : expected) {
      if (!steps.contains(key.step) || !steps.contains(key.step - 1) ||
          matches_any(policy_.not_recorded, key))
        continue;
      const std::set<int>& readers = read[key];
      std::vector<int> missing;
      std::ranges::set_difference(ranks, readers, std::back_inserter(missing));
      if (missing.empty()) continue;
      const bool is_all = readers.empty();
      add(make_finding(key, is_all ? FindingId::kReadsMissing : FindingId::kReadsMissingOnRanks),
          is_all ? std::vector<int>{} : missing);
    }
  }

  void add(Finding finding, std::vector<int> ranks) {
    finding.ranks = std::move(ranks);
    finding.confirmed = true;
    result_.findings.push_back(std::move(finding));
  }

  bool repeats(const Record& record, const Index& own) {
    if (role_of(record.key) == NameRole::kRecomputed) {
      const auto found = own.find(base_of(record.key));
      return found != own.end() && found->second->dtype == record.dtype &&
             digests_of(*found->second) == digests_of(record);
    }
    const Digests& stepped = after_step(record.key.step - 1, base_of(record.key).name);
    const Digests read = digests_of(record);
    return std::ranges::all_of(read, [&](const auto& entry) {
      const auto found = stepped.find(entry.first);
      return found != stepped.end() && found->second == entry.second;
    });
  }

  /// Gives the last finding its cause.
  void explain(Cause cause) {
    Finding& last = result_.findings.back();
    last.diagnosis = cause.text;
    last.cause = std::move(cause);
  }

  /// Whether the ranks read what the parameter was one step earlier.
  void diagnose_read(Finding& finding) {
    const std::string parameter = base_of(finding.key).name;
    const Digests& earlier = after_step(finding.key.step - 2, parameter);
    for (std::size_t r = 0; r < run_.ranks.size(); ++r) {
      if (!std::ranges::count(finding.ranks, run_.ranks[r].rank)) continue;
      for (const auto& [place, digests] : digests_of(*indices_[r].at(finding.key))) {
        const auto found = earlier.find(place);
        if (found == earlier.end() || found->second != digests) return;
      }
    }
    explain(make_cause(CauseId::kStaleParametersRead,
                       {{"step", finding.key.step},
                        {"parameter", parameter},
                        {"steps", 1},
                        {"ranks", finding.ranks},
                        NamedValue::words("where", words_of_ranks(finding.ranks))}));
  }

  /// By place, what ranks recorded of a parameter last in a step; before step 0, first in it.
  const Digests& after_step(int step, const std::string& parameter) {
    const auto [entry, is_new] = stepped_.try_emplace({step, parameter});
    if (!is_new) return entry->second;
    for (const Index& index : indices_) {
      if (step < 0) {
        const auto first = index.find({0, RecordKind::kParam, parameter, 0});
        if (first != index.end()) add_digests(*first->second, entry->second);
        continue;
      }
      auto last = index.upper_bound({step, RecordKind::kParam, parameter, kLastCall});
      if (last == index.begin()) continue;
      --last;
      const RecordKey& key = last->first;
      if (key.step == step && key.kind == RecordKind::kParam && key.name == parameter)
        add_digests(*last->second, entry->second);
    }
    return entry->second;
  }

  void judge_collectives() {
    if (!policy_.collectives) {
      const bool any = std::ranges::any_of(run_.ranks, [](const RankTrace& rank) {
        return std::ranges::any_of(
            rank.records, [](const Record& r) { return role_of(r.key) == NameRole::kCollectives; });
      });
      if (any)
        result_.collectives = "collectives were recorded and not judged: no table was asked for";
      return;
    }
    // A call along an axis that the mesh has not is in no table.
    std::set<int> steps;
    std::set<Axis> axes{Axis::kWorld};
    for (const AxisDegree& axis : run_.mesh.axes()) axes.insert(axis.axis);
    for (const RankTrace& rank : run_.ranks) {
      for (const Record& record : rank.records) {
        const bool is_of_calls = role_of(record.key) == NameRole::kCollectives;
        if (record.key.kind == RecordKind::kGrad || is_of_calls) steps.insert(record.key.step);
        if (is_of_calls) axes.insert(axis_of_collectives(record.key));
      }
    }
    std::int64_t calls = 0;
    for (std::size_t r = 0; r < run_.ranks.size(); ++r) {
      for (const int step : steps) {
        for (const Axis axis : axes) calls += judge_calls(r, step, axis);
      }
    }
    result_.collectives = fmt::format(
        "{} collective calls of {} ranks in {} step{} were compared with the subject's table: op, "
        "purpose, reduction, dtype, bytes, and their order on each axis",
        calls, run_.ranks.size(), steps.size(), steps.size() == 1 ? "" : "s");
    if (allowed_ > 0)
      result_.collectives += fmt::format(
          "; {} lists of calls were not recorded or not read, as --not-recorded allows", allowed_);
  }

  std::int64_t judge_calls(std::size_t r, int step, Axis axis) {
    const int rank = run_.ranks[r].rank;
    const std::vector<ExpectedCall> expected = policy_.collectives(rank, step, axis);
    const RecordKey key{step, RecordKind::kScalar, collectives_name(axis, rank), 0};
    const auto found = indices_[r].find(key);
    if (found == indices_[r].end()) {
      if (!expected.empty() && matches_any(policy_.not_recorded, key)) {
        ++allowed_;
      } else if (!expected.empty()) {
        add(make_finding(key, FindingId::kCallsMissing, {},
                         {{"calls", expected.size()}, {"first", describe(expected.front().call)}}),
            {rank});
        // a rank that records no calls at all may make all of them
        if (has_calls(r, step))
          explain(
              make_cause(CauseId::kNoCallAlongAxis, {{"axis", name_of(axis)},
                                                     {"calls", expected.size()},
                                                     {"first", describe(expected.front().call)}}));
      }
      return 0;
    }
    const Record& record = *found->second;
    const bool is_wrong = std::ranges::any_of(
        record.parts, [](const PartStats& part) { return part.stats.unequal_values != 0; });
    if (is_wrong) {
      const auto mismatch = mismatch_of(run_.ranks[r], record, expected);
      const FindingId id = mismatch.has_value() ? FindingId::kCallDiffersFromTable
                                                : FindingId::kUnknownCallDiffersFromTable;
      NamedValues values = {{"call", record.parts.front().stats.first_unequal + 1}};
      if (mismatch.has_value())
        values = {{"call", mismatch->index + 1},
                  {"calls", mismatch->calls},
                  {"must", mismatch->must},
                  {"got", mismatch->got}};
      add(make_finding(key, id, std::move(values),
                       {{"table_calls", expected.size()}, {"axis", name_of(axis)}}),
          {rank});
      if (mismatch.has_value() && is_made_again(run_.ranks[r], record, mismatch->index))
        explain(make_cause(CauseId::kCallMadeAgain, {{"call", mismatch->index}}));
    }
    return record.local_shape.empty() ? 0 : record.local_shape.front();
  }

  /// Whether a rank has recorded its calls along some axis of a step.
  bool has_calls(std::size_t r, int step) const {
    return std::ranges::any_of(run_.ranks[r].records, [step](const Record& record) {
      return record.key.step == step && role_of(record.key) == NameRole::kCollectives;
    });
  }

  /// Whether a call is the one before it once more.
  static bool is_made_again(const RankTrace& rank, const Record& record, std::size_t index) {
    const HostTensor rows = rank.tensor(record);
    const std::vector<CollectiveCall> calls = calls_of(rows.bytes);
    return index > 0 && index < calls.size() &&
           describe(calls[index]) == describe(calls[index - 1]);
  }

  std::optional<CallMismatch> mismatch_of(const RankTrace& rank, const Record& record,
                                          const std::vector<ExpectedCall>& expected) const {
    if (!record.kept || rank.arena == nullptr) return std::nullopt;
    const HostTensor rows = rank.tensor(record);
    return first_mismatch(expected, calls_of(rows.bytes),
                          RunView(rank).is_skipped(record.key.step));
  }

  static constexpr int kLastCall = std::numeric_limits<int>::max();
  const Trace& run_;
  const JudgePolicy& policy_;
  std::vector<Index> indices_;
  std::map<std::pair<int, std::string>, Digests> stepped_;
  std::int64_t allowed_ = 0;  ///< lists of calls that need not be there, and are not
  std::map<int, std::set<RecordKey>> recomputed_;  ///< activations, by step
  OwnRecords result_;
};

}  // namespace

OwnRecords judge_own_records(const Trace& run, const JudgePolicy& policy) {
  return OwnJudge(run, policy).judge();
}

}  // namespace isoshard
