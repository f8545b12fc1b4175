// SPDX-License-Identifier: Apache-2.0
/// The best alignment of two lists of calls, by dynamic programming.
#include "harness/judge/journals/align_calls.h"

#include <fmt/format.h>

#include <algorithm>

namespace isoshard {
namespace {

/// Cells of the table: some MB.
constexpr std::size_t kMaxCells = std::size_t{1} << 22;

/// Ranks may give parts of different sizes.
bool may_be_uneven(const JournaledCall& call) {
  return call.op == "all_to_all" || call.op == "all_gather" || call.op == "gather";
}

bool agree(const JournaledCall& a, const JournaledCall& b) {
  return a.op == b.op && a.reduction == b.reduction && a.dtype == b.dtype && a.peer == b.peer &&
         (a.bytes == b.bytes || may_be_uneven(a));
}

bool is_same(const JournaledCall& a, const JournaledCall& b) {
  return agree(a, b) && a.bytes == b.bytes && a.phase == b.phase && a.at == b.at && a.of == b.of;
}

/// What it is worth to take two calls for the same; 0 if they cannot be.
int worth(const JournaledCall& a, const JournaledCall& b) {
  if (!agree(a, b)) return 0;
  constexpr int kAgree = 16, kTensor = 8, kPhase = 2, kLine = 1;
  return kAgree + (a.of == b.of ? kTensor : 0) + (a.phase == b.phase ? kPhase : 0) +
         (a.at == b.at ? kLine : 0);
}

class Table {
 public:
  Table(std::span<const JournaledCall* const> expected,
        std::span<const JournaledCall* const> actual)
      : expected_(expected),
        actual_(actual),
        best_((expected.size() + 1) * (actual.size() + 1), 0) {
    for (std::size_t i = expected.size(); i-- > 0;) {
      for (std::size_t j = actual.size(); j-- > 0;) {
        const int both = worth(*expected[i], *actual[j]);
        const int kept = both == 0 ? 0 : both + best(i + 1, j + 1);
        best(i, j) = std::max({kept, best(i + 1, j), best(i, j + 1)});
      }
    }
  }

  /// Unmatched calls between two matched ones are paired: one stands where the other is due.
  std::vector<CallDifference> read(std::size_t offset) {
    std::vector<CallDifference> found;
    std::size_t i = 0, j = 0, first_i = 0, first_j = 0;
    const auto flush = [&] {
      for (; first_i < i || first_j < j; ++first_i, ++first_j) {
        CallDifference difference;
        if (first_i < i) difference.expected = offset + first_i;
        if (first_j < j) difference.actual = offset + first_j;
        found.push_back(difference);
      }
      first_i = i + 1;
      first_j = j + 1;
    };
    while (i < expected_.size() && j < actual_.size()) {
      const int both = worth(*expected_[i], *actual_[j]);
      if (both > 0 && best(i, j) == both + best(i + 1, j + 1)) {
        flush();
        ++i;
        ++j;
      } else if (best(i, j) == best(i + 1, j)) {
        ++i;
      } else {
        ++j;
      }
    }
    i = expected_.size();
    j = actual_.size();
    flush();
    return found;
  }

 private:
  int& best(std::size_t i, std::size_t j) { return best_[i * (actual_.size() + 1) + j]; }

  std::span<const JournaledCall*const> expected_, actual_;
  std::vector<int> best_;
};

}  // namespace

std::string common_words(const JournaledCall& call) {
  std::string text = call.op;
  if (!call.reduction.empty()) text += fmt::format(" ({})", call.reduction);
  if (call.peer >= 0)
    text += fmt::format(" {} rank {}", call.op == "send" ? "to" : "from", call.peer);
  if (!call.dtype.empty() && !may_be_uneven(call)) text += fmt::format(" of {} bytes", call.bytes);
  if (!call.dtype.empty()) text += " in " + call.dtype;
  return text;
}

std::string words_of(const JournaledCall& call) {
  std::string text = common_words(call);
  if (may_be_uneven(call)) text += fmt::format(", {} bytes", call.bytes);
  std::string where;
  for (const std::string* part : {&call.of, &call.phase, &call.at}) {
    if (!part->empty()) where += (where.empty() ? "" : ", ") + *part;
  }
  return where.empty() ? text : fmt::format("{} ({})", text, where);
}

std::vector<CallDifference> differences(const CallList& expected, const CallList& actual) {
  const bool all_agree = std::ranges::equal(
      expected, actual,
      [](const JournaledCall* a, const JournaledCall* b) { return agree(*a, *b); });
  if (all_agree) return {};
  const std::size_t shorter = std::min(expected.size(), actual.size());
  std::size_t head = 0, tail = 0;
  while (head < shorter && is_same(*expected[head], *actual[head])) ++head;
  while (tail < shorter - head &&
         is_same(*expected[expected.size() - 1 - tail], *actual[actual.size() - 1 - tail]))
    ++tail;
  const auto middle = [&](const CallList& list) {
    return std::span(list).subspan(head, list.size() - head - tail);
  };
  const auto expected_middle = middle(expected), actual_middle = middle(actual);
  if ((expected_middle.size() + 1) * (actual_middle.size() + 1) > kMaxCells) {
    std::size_t first = head;
    while (first < shorter && agree(*expected[first], *actual[first])) ++first;
    CallDifference difference;
    if (first < expected.size()) difference.expected = first;
    if (first < actual.size()) difference.actual = first;
    return {difference};
  }
  return Table(expected_middle, actual_middle).read(head);
}

}  // namespace isoshard
