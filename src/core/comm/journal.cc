// SPDX-License-Identifier: Apache-2.0
/// The journal's rings of atomic words, and the sentences made from them.
#include "core/comm/journal.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <new>

namespace isoshard {
namespace {

using Word = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free, "the journal is shared between processes");

// Words of an entry: 0 sequence << 1 | done, written last and checked after reading; 1 op, purpose,
// axis, dtype, reduction, one byte each, then the group's size; 2 count; 3 root; 4 group id; 5
// group sequence; from 6 on the group's members, as many words as the world's ranks need.
constexpr std::size_t kFixedWords = 6;
constexpr std::size_t kMaxEntryWords = kFixedWords + RankSet::kMaxWords;
using Words = std::array<std::uint64_t, kMaxEntryWords>;

constexpr std::size_t used_words(int num_ranks) {
  return kFixedWords +
         static_cast<std::size_t>((num_ranks + RankSet::kWordBits - 1) / RankSet::kWordBits);
}

// Whole cache lines.
constexpr std::size_t entry_words(int num_ranks) {
  constexpr std::size_t kLine = 64 / sizeof(Word);
  return (used_words(num_ranks) + kLine - 1) / kLine * kLine;
}

void encode(const JournalEntry& entry, std::size_t num_words, Words& words) noexcept {
  const CollectiveCall& call = entry.call;
  const auto byte = [](auto value, int position) {
    return static_cast<std::uint64_t>(value) << (8 * position);
  };
  words[1] = byte(call.op, 0) | byte(call.purpose, 1) | byte(call.axis, 2) | byte(call.dtype, 3) |
             byte(call.reduction, 4) | byte(entry.group_size, 5);
  words[2] = static_cast<std::uint64_t>(call.count);
  words[3] = static_cast<std::uint32_t>(call.root);
  words[4] = call.group_id;
  words[5] = call.group_sequence;
  std::copy_n(entry.group_members.words.begin(), num_words - kFixedWords,
              words.begin() + kFixedWords);
}

JournalEntry decode(const Words& words, std::size_t num_words, std::uint64_t head) noexcept {
  const auto byte = [&](int position) {
    return static_cast<std::uint8_t>(words[1] >> (8 * position));
  };
  JournalEntry entry;
  entry.call.op = static_cast<CollectiveOp>(byte(0));
  entry.call.purpose = static_cast<Purpose>(byte(1));
  entry.call.axis = static_cast<Axis>(byte(2));
  entry.call.dtype = static_cast<Dtype>(byte(3));
  entry.call.reduction = static_cast<Reduction>(byte(4));
  entry.group_size = static_cast<std::uint32_t>(words[1] >> (8 * 5));
  entry.call.count = static_cast<std::int64_t>(words[2]);
  entry.call.root = static_cast<std::int32_t>(static_cast<std::uint32_t>(words[3]));
  entry.call.group_id = words[4];
  entry.call.group_sequence = words[5];
  std::copy_n(words.begin() + kFixedWords, num_words - kFixedWords,
              entry.group_members.words.begin());
  entry.sequence = head >> 1;
  entry.state = (head & 1) != 0 ? CallState::kDone : CallState::kEntered;
  return entry;
}

std::string ranks_in_words(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

std::string_view plural(const std::vector<int>& ranks, std::string_view one,
                        std::string_view many) {
  return ranks.size() == 1 ? one : many;
}

}  // namespace

/// How far a rank is in a group. The id is written once, and read before the sequence.
struct Progress {
  Word group;  ///< 1 + group_id, 0 while it is free
  Word sequence;
};

// The entries of its ring follow it.
struct alignas(64) Journal::Lane {
  Word num_calls;
  std::array<std::array<Word, kNumPurposes>, kNumCollectiveOps> counts;
  std::array<Progress, kMaxGroups> last_entered;  ///< found by a hash of the id, then upwards

  /// That of a group, or the free one that is to become it; null if there is none left.
  Progress* last_entered_of(std::uint64_t group_id) noexcept {
    static_assert(kMaxGroups == 1U << 9);
    const std::uint64_t first = (group_id * 0x9e3779b97f4a7c15U) >> (64 - 9);
    for (std::uint64_t step = 0; step < kMaxGroups; ++step) {
      Progress& progress = last_entered[(first + step) % kMaxGroups];
      const std::uint64_t found = progress.group.load(std::memory_order_acquire);
      if (found == 0 || found == group_id + 1) return &progress;
    }
    return nullptr;
  }
  void enter_group(std::uint64_t group_id, std::uint64_t sequence) noexcept {
    if (group_id == kGroupOfOne) return;
    Progress* const progress = last_entered_of(group_id);
    if (progress == nullptr) return;
    const std::uint64_t before = progress->sequence.load(std::memory_order_relaxed);
    progress->group.store(group_id + 1, std::memory_order_release);
    progress->sequence.store(std::max(before, sequence));
  }
};

namespace {

constexpr std::size_t words_of_ring(int num_ranks) {
  return Journal::kDepth * entry_words(num_ranks);
}

}  // namespace

std::size_t Journal::bytes(int num_ranks) noexcept {
  return (sizeof(Lane) + words_of_ring(num_ranks) * sizeof(Word)) *
         static_cast<std::size_t>(num_ranks);
}

Journal::Word* Journal::words_of_lane(int rank) const noexcept {
  return std::launder(reinterpret_cast<Word*>(memory_ + num_lane_words() * sizeof(Word) *
                                                            static_cast<std::size_t>(rank)));
}

Journal::Lane& Journal::lane(int rank) const noexcept {
  return *std::launder(reinterpret_cast<Lane*>(words_of_lane(rank)));
}

Journal::Word* Journal::slot(int rank, std::uint64_t sequence) const noexcept {
  return words_of_lane(rank) + sizeof(Lane) / sizeof(Word) +
         sequence % kDepth * entry_words(num_ranks_);
}

void Journal::write(int rank, std::uint64_t sequence, std::uint64_t state,
                    const JournalEntry& entry) noexcept {
  Words words;  // NOLINT: filled up to num_words
  const std::size_t num_words = used_words(num_ranks_);
  encode(entry, num_words, words);
  Word* const to = slot(rank, sequence);
  // who reads one of the new words below also reads this, and drops the entry
  to[0].store(0, std::memory_order_relaxed);
  for (std::size_t i = 1; i < num_words; ++i) to[i].store(words[i], std::memory_order_release);
  to[0].store(sequence << 1 | state, std::memory_order_release);
}

std::uint64_t Journal::enter(int rank, const JournalEntry& entry) noexcept {
  Lane& own = lane(rank);
  const std::uint64_t sequence = own.num_calls.load(std::memory_order_relaxed) + 1;
  write(rank, sequence, 0, entry);
  Word& count = own.counts[static_cast<std::size_t>(entry.call.op)]
                          [static_cast<std::size_t>(entry.call.purpose)];
  count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  own.enter_group(entry.call.group_id, entry.call.group_sequence);
  // seq_cst: of two ranks that wait for each other at least one sees the other's entry
  own.num_calls.store(sequence);
  return sequence;
}

void Journal::finish(int rank, std::uint64_t sequence) noexcept {
  Word& head = *slot(rank, sequence);
  // of a transfer that took so long, the entry is gone
  if (head.load(std::memory_order_relaxed) >> 1 != sequence) return;
  head.store(sequence << 1 | 1, std::memory_order_release);
}

void Journal::promise(int rank, const CollectiveCall& call) noexcept {
  lane(rank).enter_group(call.group_id, call.group_sequence);
}

std::size_t Journal::num_lane_words() const noexcept {
  return sizeof(Lane) / sizeof(Word) + words_of_ring(num_ranks_);
}

void Journal::copy_lane(int rank, std::span<std::uint64_t> words) const noexcept {
  const Word* const own = words_of_lane(rank);
  for (std::size_t i = 0; i < num_lane_words(); ++i)
    words[i] = own[i].load(std::memory_order_relaxed);
}

void Journal::set_lane(int rank, std::span<const std::uint64_t> words) noexcept {
  Word* const own = words_of_lane(rank);
  for (std::size_t i = 0; i < num_lane_words(); ++i)
    own[i].store(words[i], std::memory_order_relaxed);
}

// The number of calls, the last entry's words, then id and sequence of each group.
std::vector<std::uint64_t> Journal::whereabouts(int rank) const {
  const std::uint64_t newest = num_calls(rank);
  const Word* const entry = slot(rank, newest);
  std::vector<std::uint64_t> words = {newest};
  for (std::size_t i = 0; i < used_words(num_ranks_); ++i)
    words.push_back(entry[i].load(std::memory_order_relaxed));
  for (const Progress& progress : lane(rank).last_entered) {
    const std::uint64_t group = progress.group.load(std::memory_order_relaxed);
    if (group == 0) continue;
    words.push_back(group - 1);
    words.push_back(progress.sequence.load(std::memory_order_relaxed));
  }
  return words;
}

void Journal::set_whereabouts(int rank, std::span<const std::uint64_t> words) noexcept {
  const std::size_t first_group = 1 + used_words(num_ranks_);
  if (words.size() < first_group || (words.size() - first_group) % 2 != 0) return;
  Word* const entry = slot(rank, words[0]);
  for (std::size_t i = 1; i < first_group; ++i)
    entry[i - 1].store(words[i], std::memory_order_relaxed);
  Lane& own = lane(rank);
  for (std::size_t i = first_group; i < words.size(); i += 2)
    own.enter_group(words[i], words[i + 1]);
  own.num_calls.store(words[0]);
}

std::uint64_t Journal::num_calls(int rank) const noexcept {
  return lane(rank).num_calls.load(std::memory_order_seq_cst);
}

std::uint64_t Journal::num_calls(int rank, CollectiveOp op, Purpose purpose) const noexcept {
  return lane(rank).counts[static_cast<std::size_t>(op)][static_cast<std::size_t>(purpose)].load(
      std::memory_order_acquire);
}

std::optional<JournalEntry> Journal::read(int rank, std::uint64_t sequence) const noexcept {
  const Word* const from = slot(rank, sequence);
  const std::uint64_t head = from[0].load(std::memory_order_acquire);
  if (head >> 1 != sequence) return std::nullopt;
  Words words;  // NOLINT: filled up to num_words
  const std::size_t num_words = used_words(num_ranks_);
  for (std::size_t i = 1; i < num_words; ++i) words[i] = from[i].load(std::memory_order_acquire);
  if (from[0].load(std::memory_order_acquire) >> 1 != sequence) return std::nullopt;
  return decode(words, num_words, head);
}

std::vector<JournalEntry> Journal::entries(int rank) const {
  const std::uint64_t newest = num_calls(rank);
  std::vector<JournalEntry> result;
  for (std::uint64_t sequence = newest > kDepth ? newest - kDepth + 1 : 1; sequence <= newest;
       ++sequence) {
    if (const auto entry = read(rank, sequence)) result.push_back(*entry);
  }
  return result;
}

std::optional<JournalEntry> Journal::last(int rank) const {
  const std::uint64_t newest = num_calls(rank);
  return newest == 0 ? std::nullopt : read(rank, newest);
}

std::uint64_t Journal::last_entered(int rank, std::uint64_t group_id) const noexcept {
  const Progress* const progress = lane(rank).last_entered_of(group_id);
  return progress == nullptr ? 0 : progress->sequence.load();
}

std::string Journal::last_call_in_words(int rank) const {
  const auto entry = last(rank);
  if (!entry) return "before its first collective";
  return fmt::format("{} {}", entry->state == CallState::kDone ? "after" : "in",
                     in_words(entry->call));
}

std::string Journal::describe_hang() const {
  std::vector<std::optional<JournalEntry>> lasts;
  for (int rank = 0; rank < num_ranks_; ++rank) lasts.push_back(last(rank));
  const auto is_in = [&](int rank, const CollectiveCall& call) {
    const auto& entry = lasts[static_cast<std::size_t>(rank)];
    return entry && entry->state == CallState::kEntered && entry->call.group_id == call.group_id &&
           entry->call.group_sequence == call.group_sequence;
  };
  const auto has_passed = [&](int rank, const CollectiveCall& call) {
    return last_entered(rank, call.group_id) >= call.group_sequence;
  };
  std::vector<std::string> clauses;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const auto& entry = lasts[static_cast<std::size_t>(rank)];
    if (!entry || entry->state == CallState::kDone) continue;
    std::vector<int> waiting;
    std::vector<int> missing;
    for (int member = 0; member < num_ranks_; ++member) {
      if (!entry->group_members.contains(member)) continue;
      if (is_in(member, entry->call)) {
        waiting.push_back(member);
      } else if (!has_passed(member, entry->call)) {
        missing.push_back(member);
      }
    }
    // reported once, at its first waiting rank
    if (waiting.empty() || waiting.front() != rank) continue;
    const std::string call = in_words(entry->call);
    if (missing.empty()) {
      clauses.push_back(fmt::format("every rank has entered {}; {} {} not left it", call,
                                    ranks_in_words(waiting), plural(waiting, "has", "have")));
      continue;
    }
    std::string clause = fmt::format("{} {} not entered {}; {} {} in it", ranks_in_words(missing),
                                     plural(missing, "has", "have"), call, ranks_in_words(waiting),
                                     plural(waiting, "waits", "wait"));
    for (const int member : missing)
      clause += fmt::format("; rank {} is {}", member, last_call_in_words(member));
    clauses.push_back(clause);
  }
  return fmt::format("{}", fmt::join(clauses, ". "));
}

// Extends the path, whose last rank waits in its last entry, until it returns to its first rank.
// From a rank that was seen there is no way there, or it is in the path.
bool Journal::find_circle(std::vector<JournalEntry>& path, std::vector<int>& ranks,
                          RankSet& seen) const {
  const JournalEntry waiting = path.back();
  for (int member = 0; member < num_ranks_; ++member) {
    const bool missing = waiting.group_members.contains(member) &&
                         last_entered(member, waiting.call.group_id) < waiting.call.group_sequence;
    if (!missing) continue;
    if (member == ranks.front()) return true;
    if (seen.contains(member)) continue;
    seen.insert(member);
    const auto entry = last(member);
    if (!entry || entry->state == CallState::kDone) continue;
    path.push_back(*entry);
    ranks.push_back(member);
    if (find_circle(path, ranks, seen)) return true;
    path.pop_back();
    ranks.pop_back();
  }
  return false;
}

std::string Journal::describe_circular_wait(int rank) const {
  const auto own = last(rank);
  if (!own || own->state == CallState::kDone) return {};
  std::vector<JournalEntry> path = {*own};
  std::vector<int> ranks = {rank};
  RankSet seen = {rank};
  if (!find_circle(path, ranks, seen)) return {};
  // The ranks were looked at one after the other. If every one still is in the same call and still
  // lacks the next one, then between the two looks all of this was true at once.
  std::vector<std::string> clauses;
  for (std::size_t i = 0; i < path.size(); ++i) {
    const int next = ranks[(i + 1) % ranks.size()];
    const auto again = last(ranks[i]);
    if (!again || again->sequence != path[i].sequence || again->state == CallState::kDone)
      return {};
    if (last_entered(next, path[i].call.group_id) >= path[i].call.group_sequence) return {};
    clauses.push_back(
        fmt::format("rank {} waits for rank {} in {}", ranks[i], next, in_words(path[i].call)));
  }
  return fmt::format("{}", fmt::join(clauses, "; "));
}

}  // namespace isoshard
