// SPDX-License-Identifier: Apache-2.0
// Two runs, record by record, by what was written down of each part when it was recorded.
#include "harness/verdict/equal_runs.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/mesh/layout.h"
#include "harness/trace/collective_calls.h"
#include "harness/trace/parts.h"
#include "harness/trace/record.h"

namespace isoshard {
namespace {

using PartKey = std::tuple<Shape, Shape, std::int64_t, std::int64_t, std::uint64_t>;

// Where each part lies in the whole, and its digest, in an order that does not depend on how the
// layout says it.
std::vector<PartKey> places_of(const Record& record) {
  std::vector<PartKey> parts;
  const bool flat = is_flat(record.layout);
  for (const PartStats& part : record.parts) {
    if (numel_of(part, flat) == 0) continue;
    if (flat) {
      parts.emplace_back(Shape{}, Shape{}, part.range.global_begin, part.range.count, part.digest);
    } else {
      parts.emplace_back(part.box.global_offset, part.box.size, 0, 0, part.digest);
    }
  }
  std::sort(parts.begin(), parts.end());
  return parts;
}

std::string difference_of(const Record& expected, const Record& actual) {
  if (expected.dtype != actual.dtype)
    return fmt::format("is {}, not {}", name_of(actual.dtype), name_of(expected.dtype));
  if (expected.grad_scale != actual.grad_scale)
    return fmt::format("declares the gradient scale {}, not {}", actual.grad_scale,
                       expected.grad_scale);
  if (is_partial(expected.layout) != is_partial(actual.layout))
    return "is a summand in one run only";
  if (places_of(expected) != places_of(actual)) return "differs";
  return "";
}

std::map<RecordKey, const Record*> index_of(const RankTrace& rank) {
  std::map<RecordKey, const Record*> index;
  for (const Record& record : rank.records) index.emplace(record.key, &record);
  return index;
}

/// Keeps the earlier one.
void keep_first(std::optional<RunDifference>& first, RunDifference found) {
  const auto place = [](const RunDifference& d) {
    return std::tuple(d.key->step, d.order, d.rank, d.key->name);
  };
  if (!first.has_value() || place(found) < place(*first)) first = std::move(found);
}

std::optional<RunDifference> difference_of(const RankTrace& expected, const RankTrace& actual,
                                           std::set<RecordKey>& equal) {
  const std::map<RecordKey, const Record*> wanted = index_of(expected);
  // What a run says of itself alone is not in the expected one: parameters read again, calls.
  const auto is_own = [&](const Record& record) {
    return !wanted.contains(record.key) && (role_of(record.key) == NameRole::kReadAgain ||
                                            role_of(record.key) == NameRole::kCollectives);
  };
  std::set<RecordKey> met;
  std::optional<RunDifference> first;
  for (const Record& record : actual.records) {
    if (is_own(record)) continue;
    auto found = wanted.find(record.key);
    // A mask that backward drew again, where the expected run drew it once, is held to that one.
    const bool is_second_draw =
        found == wanted.end() && role_of(record.key) == NameRole::kRecomputed;
    if (is_second_draw) found = wanted.find(base_of(record.key));
    if (found == wanted.end()) {
      keep_first(first,
                 {record.key, actual.rank, record.order, "was recorded, which is not expected,"});
      continue;
    }
    if (!is_second_draw) met.insert(found->first);
    std::string difference = difference_of(*found->second, record);
    if (!difference.empty())
      keep_first(first, {record.key, actual.rank, record.order, std::move(difference)});
    else if (role_of(record.key) != NameRole::kSummand)
      equal.insert(found->first);
  }
  for (const auto& [key, record] : wanted) {
    if (!met.contains(key))
      keep_first(first, {key, actual.rank, record->order, "was not recorded"});
  }
  return first;
}

}  // namespace

std::string RunDifference::describe() const {
  if (!key.has_value()) return what;
  return fmt::format("{} {} on rank {}", isoshard::describe(*key), what, rank);
}

RunEquality equality_of(const Trace& expected, const Trace& actual) {
  RunEquality result;
  const auto ends_with = [&result](RunDifference first) {
    result.difference = first.describe();
    result.first = std::move(first);
    return result;
  };
  if (expected.ranks.size() != actual.ranks.size())
    return ends_with({.what = fmt::format("{} ranks instead of {}", actual.ranks.size(),
                                          expected.ranks.size())});
  std::set<RecordKey> equal;
  std::optional<RunDifference> first;
  for (const RankTrace& rank : actual.ranks) {
    const auto other =
        std::find_if(expected.ranks.begin(), expected.ranks.end(),
                     [&](const RankTrace& trace) { return trace.rank == rank.rank; });
    if (other == expected.ranks.end())
      return ends_with(
          {.rank = rank.rank, .what = fmt::format("rank {} is not expected", rank.rank)});
    if (auto found = difference_of(*other, rank, equal); found.has_value())
      keep_first(first, std::move(*found));
  }
  if (first.has_value()) return ends_with(std::move(*first));
  result.tensors = static_cast<std::int64_t>(equal.size());
  return result;
}

std::optional<UnequalCopies> find_unequal_copies(const Trace& run) {
  using Place = std::tuple<RecordKey, Shape, Shape, std::int64_t, std::int64_t>;
  std::map<Place, std::pair<std::uint64_t, int>> seen;
  std::optional<UnequalCopies> first;
  std::pair<int, std::int64_t> first_at;  // step, and place in its rank's execution
  for (const RankTrace& rank : run.ranks) {
    for (const Record& record : rank.records) {
      if (is_partial(record.layout) ||
          (first.has_value() && std::pair(record.key.step, record.order) >= first_at))
        continue;
      for (const auto& [offset, size, begin, count, digest] : places_of(record)) {
        const auto [entry, is_new] =
            seen.try_emplace({record.key, offset, size, begin, count}, digest, rank.rank);
        if (is_new || entry->second.first == digest) continue;
        first = UnequalCopies{record.key, entry->second.second, rank.rank};
        first_at = {record.key.step, record.order};
      }
    }
  }
  return first;
}

}  // namespace isoshard
