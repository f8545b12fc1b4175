// SPDX-License-Identifier: Apache-2.0
/// Journals against each other.
#include "harness/judge/journals/judge_journals.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "core/mesh/mesh_words.h"
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

std::string words_of(const Total& total) {
  return fmt::format("{} call{} of {} bytes in all", total.calls, total.calls == 1 ? "" : "s",
                     total.bytes);
}

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

std::string words_of(const CallDifference& difference, const CallList& expected,
                     const CallList& actual) {
  if (difference.expected && difference.actual)
    return fmt::format("call {} of {} must be {}, got {}", *difference.expected + 1,
                       expected.size(), words_of(*expected[*difference.expected]),
                       words_of(*actual[*difference.actual]));
  if (difference.expected)
    return fmt::format("call {} of {} is missing, {}", *difference.expected + 1, expected.size(),
                       words_of(*expected[*difference.expected]));
  return fmt::format("call {} of {} is one too many, {}", *difference.actual + 1, actual.size(),
                     words_of(*actual[*difference.actual]));
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
  void add(int step, const Ranks& ranks, std::string what, std::string evidence) {
    const RecordKey key{step, RecordKind::kScalar, fmt::format("calls.rank{}", ranks.front()), 0};
    if (matches_any(allowed_, key)) {
      result_.notes.push_back(
          fmt::format("{} on {}, as --not-recorded allows", what, words_of_ranks(ranks)));
      return;
    }
    Finding finding;
    finding.key = key;
    finding.stage = Stage::kCollectives;
    finding.what = std::move(what);
    finding.evidence = std::move(evidence);
    finding.ranks = ranks;
    finding.confirmed = true;
    result_.findings.push_back(std::move(finding));
  }

  static std::string place_of(const Ranks& ranks, int step) {
    return fmt::format("calls over ranks {} (step {})", fmt::join(ranks, ", "), step);
  }

  void require_all(int step) {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (!journals_.contains({step, rank}))
        add(step, {rank}, fmt::format("calls (step {}): no journal", step),
            "other ranks or steps have one");
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
      add(step, {rank},
          fmt::format("{}: {}", place_of(group.first, step),
                      words_of(found.front(), expected, actual)),
          fmt::format("rank {} makes {} calls, rank {} {}; {} of them differ{}", usual_rank,
                      expected.size(), rank, actual.size(), found.size(),
                      found.size() == 1 ? "s" : ""));
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
        std::string never;
        std::size_t num_never = 0;
        for (const auto& [other, ranks] : counts) {
          if (!ranks.contains(rank) && ++num_never <= kMostNames)
            never += fmt::format("; {}: never", other);
        }
        if (num_never > kMostNames)
          never += fmt::format("; {} more: never", num_never - kMostNames);
        add(step, {rank},
            fmt::format("{}: {} is reduced {} time{}, not {}{}", place_of(group, step), name, count,
                        count == 1 ? "" : "s", usual, never),
            "the calls themselves are alike: another tensor was given");
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
    for (auto& [what, ranks] : between_steps_) {
      const auto& [step, words, evidence] = what;
      add(step, ranks, words, evidence);
    }
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
      std::string what = fmt::format("{}: {}: {}, in step {} {}", place_of(group, step),
                                     words_of(kind), words_of(total), usual_step, words_of(usual));
      const bool is_other_number = total.calls != usual.calls;
      const bool are_other_bytes = std::abs(total.bytes - usual.bytes) > kLoggedBytes;
      if (!is_other_number || !are_other_bytes || work_of(step) != work_of(usual_step)) {
        step_notes_[what].push_back(rank);
        continue;
      }
      what += first_words(calls_of(usual_step), calls_of(step));
      between_steps_[{step, what, "steps on inputs of one shape must reduce the same"}].push_back(
          rank);
    }
  }

  /// The first call that is missing or too many, if calls are nothing but that.
  static std::string first_words(const CallList& expected, const CallList& actual) {
    const std::vector<CallDifference> found = differences(expected, actual);
    const auto difference =
        std::max(expected.size(), actual.size()) - std::min(expected.size(), actual.size());
    if (found.size() != difference || found.empty()) return "";
    return "; " + words_of(found.front(), expected, actual);
  }

  const Journals& journals_;
  int world_size_;
  const Reference& reference_;
  const std::vector<std::string>& allowed_;
  std::set<int> steps_;
  std::set<std::tuple<int, int, Ranks>> seen_;  ///< steps, ranks and groups that have a finding
  std::map<std::tuple<int, std::string, std::string>, Ranks> between_steps_;
  std::map<std::string, Ranks> step_notes_;
  JournalVerdict result_;
};

}  // namespace

JournalVerdict judge_journals(const Bundle& judged, const Reference& reference,
                              const std::vector<std::string>& allowed) {
  return JournalJudge(judged, reference, allowed).judge();
}

}  // namespace isoshard
