// SPDX-License-Identifier: Apache-2.0
/// Sample ids, flags and loss scales: numbers of which sums and factors of the run say nothing.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/causes/run_causes.h"

namespace isoshard::detail {
namespace {

using Ids = std::vector<std::int64_t>;

/// What the run had of a record of ids: the reference's, but where ranks kept something else.
std::optional<Ids> ids_in_run(const Evidence& e, const RecordKey& key) {
  const Record* record = e.reference.find(key);
  if (record == nullptr || record->layout.global_shape.size() != 1) return std::nullopt;
  Ids ids = whole_numbers(e.reference_value(key));
  for (const RankTrace& rank : e.actual.ranks) {
    const Record* own = rank.find(key);
    if (own == nullptr) continue;
    const bool is_right = std::ranges::all_of(
        own->parts, [](const PartStats& part) { return part.stats.unequal_values == 0; });
    if (is_right) continue;
    if (!own->kept || rank.arena == nullptr || own->parts.size() != 1 || is_flat(own->layout) ||
        own->parts[0].box.size.size() != 1)
      return std::nullopt;
    const Ids held = whole_numbers(Values(rank.tensor(*own)));
    const Box& box = own->parts[0].box;
    for (std::int64_t i = 0; i < box.size[0]; ++i) {
      const std::int64_t to = box.global_offset[0] + i, from = box.local_offset[0] + i;
      if (to >= std::ssize(ids) || from >= std::ssize(held)) return std::nullopt;
      ids[static_cast<std::size_t>(to)] = held[static_cast<std::size_t>(from)];
    }
  }
  return ids;
}

/// Ids of steps 0 to `last`, of the run and of the reference.
struct History {
  std::map<std::int64_t, int> run, reference;
};

std::optional<History> history_of(const Evidence& e) {
  History history;
  for (int step = 0; step <= e.wanted.key.step; ++step) {
    for (int call = 0;; ++call) {
      const RecordKey key{step, e.wanted.key.kind, e.wanted.key.name, call};
      if (e.reference.find(key) == nullptr) break;
      const auto own = ids_in_run(e, key);
      if (!own.has_value()) return std::nullopt;
      for (const std::int64_t id : *own) ++history.run[id];
      for (const std::int64_t id : whole_numbers(e.reference_value(key))) ++history.reference[id];
    }
  }
  return history;
}

std::string repeats_and_gaps(const Evidence& e) {
  const auto history = history_of(e);
  if (!history.has_value()) return "";
  std::set<std::int64_t> repeated, missed, others;
  for (const auto& [id, times] : history->run) {
    const auto right = history->reference.find(id);
    if (right == history->reference.end()) {
      others.insert(id);
      if (times > 1) repeated.insert(id);
    } else if (times > right->second) {
      repeated.insert(id);
    }
  }
  for (const auto& [id, times] : history->reference) {
    const auto own = history->run.find(id);
    if (own == history->run.end()) missed.insert(id);
  }
  const std::string until =
      e.wanted.key.step == 0 ? "in step 0" : fmt::format("in steps 0..{}", e.wanted.key.step);
  std::vector<std::string> words;
  if (!repeated.empty())
    words.push_back(fmt::format("seen more often than they should be: {}", some_of(repeated)));
  if (!missed.empty()) words.push_back(fmt::format("never seen: {}", some_of(missed)));
  if (!others.empty()) words.push_back(fmt::format("not the reference's: {}", some_of(others)));
  return words.empty() ? "" : fmt::format("ids {} {}", until, fmt::join(words, "; "));
}

}  // namespace

std::string cause_sample_ids(const Evidence& e) {
  // token ids repeat, and a shift of them means nothing
  if (e.wanted.layout.global_shape.size() != 1 || e.whole.numel() < 2) return "";
  const auto own = ids_in_run(e, e.wanted.key);
  if (!own.has_value()) return "";
  const Ids right = whole_numbers(e.reference_value(e.wanted.key));
  // what comes next must not be what was there already
  constexpr std::string_view kNext = "next_";
  const bool is_next = e.wanted.key.name.starts_with(kNext);
  for (int back = is_next ? 0 : 1; back <= e.wanted.key.step; ++back) {
    RecordKey key = e.wanted.key;
    key.step -= back;
    if (is_next) key.name = key.name.substr(kNext.size());
    const Record* earlier = e.reference.find(key);
    if (earlier != nullptr && whole_numbers(e.reference_value(key)) == *own)
      return fmt::format("the ids of step {} again", key.step);
  }
  std::set<std::int64_t> differences;
  for (std::size_t i = 0; i < right.size(); ++i) differences.insert((*own)[i] - right[i]);
  const std::string counts = repeats_and_gaps(e);
  if (differences.size() == 1 && right.size() >= 3) {
    const std::int64_t by = *differences.begin();
    return fmt::format("each id is {} {} than the reference's{}", by > 0 ? by : -by,
                       by > 0 ? "more" : "less", counts.empty() ? "" : "; " + counts);
  }
  return counts;
}

std::string cause_flag(const Evidence& e) {
  if (e.wanted.key.name != "found_inf" || !e.whole.defined() || e.whole.numel() != 1) return "";
  const View* bad = e.first_bad_view();
  if (const double value = bad == nullptr ? 0 : bad->actual.item(); value != 0 && value != 1)
    return fmt::format("a flag must be 0 or 1, got {:g}{}", value, e.on_bad_ranks());
  if (e.result.differing_axes.empty()) {
    if (bad == nullptr) return "";
    return fmt::format("a flag: {:g} on every rank, {:g} in the reference", bad->actual.item(),
                       e.whole.item());
  }
  return fmt::format("a flag: differs over {}, not reduced (wrong{})",
                     join_axes(e.result.differing_axes), e.on_bad_ranks());
}

namespace {

/// The step before the given one whose gradients overflow, as the reference has it; below 0: none.
int last_overflow_before(const Reference& reference, int step) {
  for (int earlier = step - 1; earlier >= 0; --earlier) {
    const RecordKey flag = overflow_flag_of(earlier);
    if (reference.find(flag) != nullptr && Values(reference.tensor(flag)).max() != 0)
      return earlier;
  }
  return -1;
}

}  // namespace

std::string cause_in_loss_scale(const Evidence& e) {
  const RecordKey& key = e.wanted.key;
  RecordKey before = key;
  --before.step;
  if (key.name != "loss_scale" || e.reference.find(before) == nullptr || !e.is_right(before) ||
      !e.is_right(overflow_flag_of(before.step)))
    return "";
  const View* const bad = e.first_bad_view();
  if (bad == nullptr || bad->actual.numel() != 1) return "";
  const double old = e.reference_value(before).item(), seen = bad->actual.item(),
               right = e.whole.item();
  const int overflow = last_overflow_before(e.reference, key.step);
  const int good = before.step - overflow;
  const std::string since =
      fmt::format("{} step{} without an overflow{}", good, good == 1 ? "" : "s",
                  overflow < 0 ? "" : fmt::format(" since that of step {}", overflow));
  const auto change = [](double factor) {
    return factor == 1  ? std::string("stays")
           : factor > 1 ? fmt::format("grows by {:g}", factor)
                        : fmt::format("shrinks by {:g}", factor);
  };
  const std::string seen_words = change(seen / old), right_words = change(right / old);
  if (good == 0) {
    const bool is_twice = right < old && is_near(seen / old, right / old * (right / old), 1e-6);
    return fmt::format("the scale {} after the overflow of step {}, where it {}{}{}", seen_words,
                       overflow, right_words, is_twice ? ": twice in one step" : "",
                       e.on_bad_ranks());
  }
  return fmt::format("the scale {} after {}, where it {}{}", seen_words, since, right_words,
                     e.on_bad_ranks());
}

}  // namespace isoshard::detail
