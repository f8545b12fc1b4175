// SPDX-License-Identifier: Apache-2.0
/// Journals against each other.
#include "harness/judge/journals/judge_journals.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "core/mesh/mesh_words.h"
#include "harness/ids/phrase.h"
#include "harness/judge/journals/align_calls.h"
#include "harness/trace/judge_policy.h"

namespace isoshard {
namespace {

using Ranks = std::vector<int>;
/// The ranks of a group and its name. Names are empty where ranks know the group by other names.
using JournalGroup = std::pair<Ranks, std::string>;
using ByRank = std::map<int, CallList>;

bool is_point_to_point(const JournaledCall& call) {
  return call.op == "send" || call.op == "recv";
}

bool is_reducing(const JournaledCall& call) {
  return !call.reduction.empty();
}

bool is_floating(const std::string& dtype) {
  return dtype.starts_with("fp") || dtype.starts_with("bf") || dtype.starts_with("float") ||
         dtype.starts_with("complex") || dtype == "mixed";
}

/// Op, reduction and dtype.
using Kind = std::tuple<std::string, std::string, std::string>;

std::string words_of(const Kind& kind) {
  return fmt::format("{} ({}) in {}", std::get<0>(kind), std::get<1>(kind), std::get<2>(kind));
}

/// Of the tensors of one finding so many are named.
constexpr std::size_t kMostNames = 5;

struct Total {
  std::int64_t calls = 0, bytes = 0;
  auto operator<=>(const Total&) const = default;
};

/// The value that most have; of several the one that comes first.
template <class Value, class Values>
Value most_common(const Values& values) {
  std::map<Value, int> counts;
  for (const auto& [place, value] : values) ++counts[value];
  Value best = values.begin()->second;
  for (const auto& [place, value] : values) {
    if (counts[value] > counts[best]) best = value;
  }
  return best;
}

/// What a finding says of a call that is another one, missing or too many.
NamedValues values_of(const CallDifference& difference, const CallList& expected,
                      const CallList& actual) {
  NamedValues values;
  const CallList& of = difference.expected ? expected : actual;
  values.emplace_back("call", difference.expected.value_or(difference.actual.value_or(0)) + 1);
  values.emplace_back("calls", of.size());
  if (difference.expected) values.emplace_back("must", words_of(*expected[*difference.expected]));
  if (difference.actual) values.emplace_back("got", words_of(*actual[*difference.actual]));
  const PhraseId id = !difference.expected ? PhraseId::kCallIsTooMany
                      : !difference.actual ? PhraseId::kCallIsMissing
                                           : PhraseId::kCallMustBe;
  values.push_back(NamedValue::words("difference", phrase(id, values)));
  return values;
}

class JournalJudge {
 public:
  JournalJudge(const Bundle& judged, const Reference& reference,
               const std::vector<std::string>& allowed)
      : journals_(judged.journals),
        world_size_(judged.trace.mesh.world_size()),
        reference_(reference),
        allowed_(allowed) {
    for (const RankTrace& rank : judged.trace.ranks) {
      for (const Record& record : rank.records) steps_.insert(record.key.step);
    }
    for (const auto& [place, journal] : journals_) steps_.insert(place.first);
  }

  JournalVerdict judge() {
    if (journals_.empty()) return {};
    std::int64_t calls = 0;
    for (const int step : steps_) {
      require_all(step);
      for (const auto& [group, ranks] : groups_of(step)) {
        judge_ranks(step, group, ranks);
        judge_messages(step, group, ranks);
      }
    }
    for (const auto& [place, journal] : journals_) {
      calls += std::ssize(journal.calls);
      if (!journal.problem.empty())
        result_.notes.push_back(
            fmt::format("rank {} says that its journal of step {} may lack calls: {}", place.second,
                        place.first, journal.problem));
    }
    judge_steps();
    std::ranges::stable_sort(result_.findings, {}, [](const Finding& f) { return f.key.step; });
    result_.summary = fmt::format(
        "{} journaled calls of {} ranks in {} step{} were compared over the ranks of each group "
        "and over steps",
        calls, world_size_, steps_.size(), steps_.size() == 1 ? "" : "s");
    return std::move(result_);
  }

 private:
  /// `place`: where the journals part, in words.
  static Finding finding_at(int step, std::string_view place, FindingId id, NamedValues values,
                            NamedValues measured = {}) {
    Finding finding = make_finding({step, RecordKind::kScalar, "", 0}, place, id, std::move(values),
                                   std::move(measured));
    finding.stage = Stage::kCollectives;
    finding.confirmed = true;
    return finding;
  }

  void add(Finding finding, const Ranks& ranks) {
    finding.key.name = fmt::format("calls.rank{}", ranks.front());
    finding.ranks = ranks;
    if (matches_any(allowed_, finding.key)) {
      result_.notes.push_back(
          fmt::format("{} on {}, as --not-recorded allows", finding.what, words_of_ranks(ranks)));
      return;
    }
    result_.findings.push_back(std::move(finding));
  }

  static std::string place_of(const Ranks& ranks, int step) {
    return fmt::format("calls over ranks {} (step {})", fmt::join(ranks, ", "), step);
  }

  void require_all(int step) {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (!journals_.contains({step, rank}))
        add(finding_at(step, fmt::format("calls (step {})", step), FindingId::kNoJournal, {}),
            {rank});
    }
  }

  /// Every member of a group is in its entry, also without calls.
  std::map<JournalGroup, ByRank> groups_of(int step) const {
    std::map<Ranks, std::map<int, std::set<std::string>>> names;
    for (int rank = 0; rank < world_size_; ++rank) {
      const auto found = journals_.find({step, rank});
      if (found == journals_.end()) continue;
      for (const JournaledCall& call : found->second.calls)
        names[found->second.groups.at(call.group)][rank].insert(call.group);
    }
    std::set<Ranks> same_names;
    for (const auto& [ranks, of_ranks] : names) {
      const auto& first = of_ranks.begin()->second;
      if (of_ranks.size() == ranks.size() &&
          std::ranges::all_of(of_ranks, [&](const auto& entry) { return entry.second == first; }))
        same_names.insert(ranks);
    }
    std::map<JournalGroup, ByRank> groups;
    for (int rank = 0; rank < world_size_; ++rank) {
      const auto found = journals_.find({step, rank});
      if (found == journals_.end()) continue;
      for (const JournaledCall& call : found->second.calls) {
        const Ranks& ranks = found->second.groups.at(call.group);
        ByRank& lists = groups[{ranks, same_names.contains(ranks) ? call.group : ""}];
        for (const int member : ranks) lists.try_emplace(member);
        lists[rank].push_back(&call);
      }
    }
    return groups;
  }

  void judge_ranks(int step, const JournalGroup& group, const ByRank& ranks) {
    ByRank lists;
    std::map<int, std::string> texts;
    for (const auto& [rank, calls] : ranks) {
      if (!journals_.contains({step, rank})) continue;
      std::string& text = texts[rank];
      for (const JournaledCall* call : calls) {
        if (is_point_to_point(*call)) continue;
        lists[rank].push_back(call);
        text += common_words(*call) + "\n";
      }
    }
    const std::string usual = most_common<std::string>(texts);
    const int usual_rank =
        std::ranges::find(texts, usual, [](const auto& entry) { return entry.second; })->first;
    for (const auto& [rank, text] : texts) {
      if (text == usual) continue;
      const CallList &expected = lists[usual_rank], &actual = lists[rank];
      const std::vector<CallDifference> found = differences(expected, actual);
      if (found.empty()) continue;
      add(finding_at(step, place_of(group.first, step), FindingId::kCallsOfRanksDiffer,
                     values_of(found.front(), expected, actual),
                     {{"usual_rank", usual_rank},
                      {"usual_calls", expected.size()},
                      {"rank", rank},
                      {"calls", actual.size()},
                      {"different", found.size()}}),
          {rank});
      seen_.insert({step, rank, group.first});
    }
    judge_tensors(step, group.first, lists);
  }

  /// A gradient that one rank reduces more often than another one that reduces it, too. Ranks that
  /// never do may know it by another name (tied weights).
  void judge_tensors(int step, const Ranks& group, const ByRank& lists) {
    std::map<std::string, std::map<int, int>> counts;
    for (const auto& [rank, calls] : lists) {
      for (const JournaledCall* call : calls) {
        if (is_reducing(*call) && !call->of.empty()) ++counts[call->of][rank];
      }
    }
    for (const auto& [name, by_rank] : counts) {
      const int usual = most_common<int>(by_rank);
      for (const auto& [rank, count] : by_rank) {
        if (count == usual || seen_.contains({step, rank, group})) continue;
        seen_.insert({step, rank, group});
        std::vector<std::string> never;
        std::string and_never;
        for (const auto& [other, ranks] : counts) {
          if (ranks.contains(rank)) continue;
          never.push_back(other);
          if (never.size() <= kMostNames)
            and_never += phrase(PhraseId::kNeverReduced, {{"tensor", other}});
        }
        if (never.size() > kMostNames)
          and_never += phrase(PhraseId::kMoreNeverReduced, {{"more", never.size() - kMostNames}});
        add(finding_at(step, place_of(group, step), FindingId::kReducedOtherTimes,
                       {{"tensor", name},
                        {"times", count},
                        {"usual_times", usual},
                        {"never", never},
                        NamedValue::words("and_never", and_never)}),
            {rank});
      }
    }
  }

  /// Messages may cross the border of a step, so they are no findings.
  void judge_messages(int step, const JournalGroup& group, const ByRank& ranks) {
    std::map<std::tuple<int, int, std::string, std::int64_t>, std::int64_t> open;
    for (const auto& [rank, calls] : ranks) {
      for (const JournaledCall* call : calls) {
        if (!is_point_to_point(*call) || call->peer < 0) continue;
        const bool sends = call->op == "send";
        const int from = sends ? rank : call->peer, to = sends ? call->peer : rank;
        open[{from, to, call->dtype, call->bytes}] += sends ? 1 : -1;
      }
    }
    for (const auto& [message, count] : open) {
      if (count == 0) continue;
      const auto& [from, to, dtype, bytes] = message;
      result_.notes.push_back(
          fmt::format("{}: {} {} of {} bytes in {} from rank {} to rank {} without its {}",
                      place_of(group.first, step), std::abs(count), count > 0 ? "send" : "recv",
                      bytes, dtype, from, to, count > 0 ? "recv" : "send"));
    }
  }

  // -- steps
  // ---------------------------------------------------------------------------------------

  /// The inputs and gradients of a step by the trusted run: where they have other shapes, or where
  /// a parameter is frozen in one step and not in another, the calls may differ, too.
  std::map<std::tuple<RecordKind, std::string, int>, Shape> work_of(int step) const {
    std::map<std::tuple<RecordKind, std::string, int>, Shape> work;
    for (const Record& record : reference_.trace().ranks.at(0).records) {
      const RecordKey& key = record.key;
      if (key.step == step && (key.kind == RecordKind::kDataId || key.kind == RecordKind::kGrad))
        work[{key.kind, key.name, key.call}] = record.layout.global_shape;
    }
    return work;
  }

  static Total total_of(const CallList& calls) {
    Total total;
    for (const JournaledCall* call : calls) total.bytes += call->bytes;
    total.calls = std::ssize(calls);
    return total;
  }

  void judge_steps() {
    std::map<std::tuple<Ranks, Kind, int>, std::map<int, CallList>> reduced;  // rank; by step
    for (const auto& [place, journal] : journals_) {
      const auto& [step, rank] = place;
      for (const JournaledCall& call : journal.calls) {
        if (is_reducing(call) && call.phase != "between" && is_floating(call.dtype))
          reduced[{journal.groups.at(call.group), Kind{call.op, call.reduction, call.dtype}, rank}]
                 [step]
                     .push_back(&call);
      }
    }
    for (const auto& [what, by_step] : reduced) {
      const auto& [group, kind, rank] = what;
      judge_steps_of(group, kind, rank, by_step);
    }
    for (const auto& [what, told] : between_steps_) add(told.finding, told.ranks);
    for (const auto& [what, ranks] : step_notes_)
      result_.notes.push_back(fmt::format("{} on {}", what, words_of_ranks(ranks)));
  }

  void judge_steps_of(const Ranks& group, const Kind& kind, int rank,
                      const std::map<int, CallList>& by_step) {
    const auto calls_of = [&](int step) {
      const auto found = by_step.find(step);
      return found == by_step.end() ? CallList() : found->second;
    };
    std::map<int, Total> totals;
    for (const int step : steps_) {
      if (journals_.contains({step, rank})) totals[step] = total_of(calls_of(step));
    }
    const Total usual = most_common<Total>(totals);
    const int usual_step =
        std::ranges::find(totals, usual, [](const auto& entry) { return entry.second; })->first;
    for (const auto& [step, total] : totals) {
      if (total == usual || seen_.contains({step, rank, group})) continue;
      NamedValues values = {{"op", words_of(kind)},       {"calls", total.calls},
                            {"bytes", total.bytes},       {"usual_step", usual_step},
                            {"usual_calls", usual.calls}, {"usual_bytes", usual.bytes}};
      const bool is_other_number = total.calls != usual.calls;
      const bool are_other_bytes = std::abs(total.bytes - usual.bytes) > kLoggedBytes;
      if (!is_other_number || !are_other_bytes || work_of(step) != work_of(usual_step)) {
        step_notes_[finding_of_step(group, step, std::move(values)).what].push_back(rank);
        continue;
      }
      add_first_call(calls_of(usual_step), calls_of(step), values);
      Finding finding = finding_of_step(group, step, std::move(values));
      Told& told = between_steps_[{step, finding.what}];
      told.finding = std::move(finding);
      told.ranks.push_back(rank);
    }
  }

  static Finding finding_of_step(const Ranks& group, int step, NamedValues values) {
    return finding_at(step, place_of(group, step), FindingId::kCallsOfStepsDiffer,
                      std::move(values));
  }

  /// Adds the first call that is missing or too many, if calls are nothing but that.
  static void add_first_call(const CallList& expected, const CallList& actual,
                             NamedValues& values) {
    const std::vector<CallDifference> found = differences(expected, actual);
    const auto difference =
        std::max(expected.size(), actual.size()) - std::min(expected.size(), actual.size());
    if (found.size() != difference || found.empty()) return;
    const NamedValues of_call = values_of(found.front(), expected, actual);
    std::ranges::copy_if(of_call, std::back_inserter(values), [](const NamedValue& value) {
      return value.name == "must" || value.name == "got";
    });
    values.push_back(NamedValue::words("first", phrase(PhraseId::kFirstCallOf, of_call)));
  }

  const Journals& journals_;
  int world_size_;
  const Reference& reference_;
  const std::vector<std::string>& allowed_;
  std::set<int> steps_;
  std::set<std::tuple<int, int, Ranks>> seen_;  ///< steps, ranks and groups that have a finding
  struct Told {
    Finding finding;
    Ranks ranks;
  };
  std::map<std::pair<int, std::string>, Told> between_steps_;  ///< by step and what is said
  std::map<std::string, Ranks> step_notes_;
  JournalVerdict result_;
};

}  // namespace

JournalVerdict judge_journals(const Bundle& judged, const Reference& reference,
                              const std::vector<std::string>& allowed) {
  return JournalJudge(judged, reference, allowed).judge();
}

namespace {

/// Bytes of all gradients that a rank steps with.
std::int64_t bytes_of_gradients(const RankTrace& rank, int step) {
  std::int64_t bytes = 0;
  for (const Record& record : rank.records) {
    if (record.key.step == step && record.key.kind == RecordKind::kGrad &&
        !is_gradient_besides(record.key))
      bytes += numel_of(record.local_shape) * static_cast<std::int64_t>(size_of(record.dtype));
  }
  return bytes;
}

/// Where a rank reduces a gradient over at least these ranks, as its journal has it; nothing if it
/// does not.
std::optional<std::string> line_of_reduction(const Bundle& judged, const RankTrace& rank,
                                             const RecordKey& key, const Ranks& over) {
  const auto journal = judged.journals.find({key.step, rank.rank});
  if (journal == judged.journals.end()) return std::nullopt;
  const JournaledCall* bucket = nullptr;
  std::int64_t bytes = 0;
  for (const JournaledCall& call : journal->second.calls) {
    const Ranks& group = journal->second.groups.at(call.group);
    const bool has_all = std::ranges::all_of(
        over, [&](int member) { return std::ranges::find(group, member) != group.end(); });
    if (!is_reducing(call) || !is_floating(call.dtype) || !has_all) continue;
    if (call.of == "gradient of " + key.name) return call.at;
    if (!call.of.empty() || call.phase != "backward") continue;
    bytes += call.bytes;
    bucket = &call;
  }
  const std::int64_t all = bytes_of_gradients(rank, key.step);
  return bucket != nullptr && all > 0 && bytes % all == 0 ? std::optional(bucket->at)
                                                          : std::nullopt;
}

}  // namespace

void tell_reductions(const Bundle& judged, Verdict& verdict) {
  for (Finding& finding : verdict.findings) {
    const bool is_local =
        finding.cause.id == CauseId::kRankLocal || finding.cause.id == CauseId::kRankLocalPartial;
    if (!is_local || finding.key.kind != RecordKind::kGrad || finding.ranks.empty()) continue;
    for (const AxisDegree& axis : judged.trace.mesh.axes()) {
      if (word_of(finding.cause.values, "axis") != name_of(axis.axis)) continue;
      const Ranks over = judged.trace.mesh.group_of(finding.ranks.front(), axis.axis);
      std::optional<std::string> line;
      const bool is_reduced = std::ranges::all_of(over, [&](int member) {
        line = line_of_reduction(judged, judged.trace.ranks.at(static_cast<std::size_t>(member)),
                                 finding.key, over);
        return line.has_value();
      });
      if (!is_reduced) continue;
      NamedValues values = {{"reduced_at", *line}};
      if (!line->empty())
        values.push_back(
            NamedValue::words("called_at", phrase(PhraseId::kCalledAt, {{"line", *line}})));
      finding.cause.values.emplace_back("reduced_at", *line);
      finding.diagnosis += phrase(PhraseId::kAlthoughReduced, values);
    }
  }
}

}  // namespace isoshard
