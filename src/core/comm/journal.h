// SPDX-License-Identifier: Apache-2.0
/// The last calls of every rank, in shared memory. The controller can read them, even after a rank
/// has died.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/comm/collective.h"

namespace isoshard {

enum class CallState : std::uint8_t { kEntered, kDone };

/// World ranks.
class RankSet {
 public:
  static constexpr int kWordBits = 64;
  static constexpr std::size_t kMaxWords = kMaxRanks / kWordBits;

  constexpr RankSet() = default;
  constexpr RankSet(std::initializer_list<int> ranks) {
    for (const int rank : ranks) insert(rank);
  }
  constexpr void insert(int rank) noexcept { words[word_of(rank)] |= bit_of(rank); }
  constexpr void erase(int rank) noexcept { words[word_of(rank)] &= ~bit_of(rank); }
  [[nodiscard]] constexpr bool contains(int rank) const noexcept {
    return (words[word_of(rank)] & bit_of(rank)) != 0;
  }
  [[nodiscard]] constexpr bool operator==(const RankSet&) const = default;

  std::array<std::uint64_t, kMaxWords> words{};  ///< rank r is bit r % 64 of word r / 64

 private:
  static constexpr std::size_t word_of(int rank) noexcept {
    return static_cast<std::size_t>(rank / kWordBits);
  }
  static constexpr std::uint64_t bit_of(int rank) noexcept {
    return std::uint64_t{1} << (rank % kWordBits);
  }
};

struct JournalEntry {
  CollectiveCall call;
  std::uint64_t sequence = 0;  ///< the number of this call of the rank on any group, from 1
  std::uint32_t group_size = 1;
  RankSet group_members;
  CallState state = CallState::kEntered;
};

/// A view of the journal in a world's region. Entries are written by their own rank, before the
/// call blocks, and read by all.
///
/// Guarantees   the last kDepth calls of each rank can be read at any time, without locks; an entry
///              that its rank is just overwriting is left out. Counts per op and purpose cover all
///              calls since the start.
///
///     for (const JournalEntry& entry : world.journal().entries(1)) log(in_words(entry.call));
class Journal {
 public:
  static constexpr std::size_t kDepth = 64;

  /// Bytes of the region for `num_ranks` ranks.
  [[nodiscard]] static std::size_t bytes(int num_ranks) noexcept;
  /// `memory` is zeroed or an existing journal, and 64-byte aligned.
  Journal(std::byte* memory, int num_ranks) noexcept : memory_(memory), num_ranks_(num_ranks) {}

  [[nodiscard]] int num_ranks() const noexcept { return num_ranks_; }

  /// For the rank itself. enter returns the entry's sequence number, which finish takes.
  std::uint64_t enter(int rank, const JournalEntry& entry) noexcept;
  void finish(int rank, std::uint64_t sequence) noexcept;
  /// Says that the rank will make the call without being waited for: who waits for it waits for
  /// nobody.
  void promise(int rank, const CollectiveCall& call) noexcept;

  /// All that is known of a rank, as plain words that can be sent to a process without this memory.
  /// Only while nobody writes to the lanes.
  [[nodiscard]] std::size_t num_lane_words() const noexcept;
  void copy_lane(int rank, std::span<std::uint64_t> words) const noexcept;
  void set_lane(int rank, std::span<const std::uint64_t> words) noexcept;
  /// Where a rank is: its last call, and how far it is in each of its groups. Much shorter than its
  /// lane, which knows earlier calls too. Only while nobody writes to the lanes.
  [[nodiscard]] std::vector<std::uint64_t> whereabouts(int rank) const;
  /// Words that whereabouts() did not make are left out.
  void set_whereabouts(int rank, std::span<const std::uint64_t> words) noexcept;

  /// Calls entered by `rank` since the start; in the second form, those of one op and purpose.
  [[nodiscard]] std::uint64_t num_calls(int rank) const noexcept;
  [[nodiscard]] std::uint64_t num_calls(int rank, CollectiveOp op, Purpose purpose) const noexcept;
  /// The last calls of `rank` that are still kept, oldest first.
  [[nodiscard]] std::vector<JournalEntry> entries(int rank) const;
  [[nodiscard]] std::optional<JournalEntry> last(int rank) const;

  /// "in all_reduce #7 (...)", "after all_reduce #6 (...)" or "before its first collective".
  [[nodiscard]] std::string last_call_in_words(int rank) const;
  /// The last call that `rank` entered or promised on a group, as its group_sequence; 0 if none.
  /// Exact, however long ago it was, for up to kMaxGroups groups a rank.
  [[nodiscard]] std::uint64_t last_entered(int rank, std::uint64_t group_id) const noexcept;
  /// Who waits for whom, one clause per pending call: "rank 1 has not entered all_reduce #7
  /// (grad_reduce, dp, sum, fp32 x 1024); ranks 0, 2 wait in it". A rank that entered something
  /// else is named with it. Empty if nothing is pending.
  [[nodiscard]] std::string describe_hang() const;
  /// Describes the circle of ranks that `rank` is in, where each rank waits for the next one in a
  /// collective of another group. Empty if there is none. A rank calls it while it waits in a
  /// collective. A circle proves a deadlock: none of its ranks can continue.
  [[nodiscard]] std::string describe_circular_wait(int rank) const;

 private:
  struct Lane;
  using Word = std::atomic<std::uint64_t>;
  [[nodiscard]] Lane& lane(int rank) const noexcept;
  [[nodiscard]] Word* words_of_lane(int rank) const noexcept;
  /// Where the entry with this number lies, as long as it is kept.
  [[nodiscard]] Word* slot(int rank, std::uint64_t sequence) const noexcept;
  void write(int rank, std::uint64_t sequence, std::uint64_t state,
             const JournalEntry& entry) noexcept;
  [[nodiscard]] std::optional<JournalEntry> read(int rank, std::uint64_t sequence) const noexcept;
  [[nodiscard]] bool find_circle(std::vector<JournalEntry>& path, std::vector<int>& ranks,
                                 RankSet& seen) const;

  std::byte* memory_;
  int num_ranks_;
};

}  // namespace isoshard
