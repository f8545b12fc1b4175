// SPDX-License-Identifier: Apache-2.0
// Calls as rows of numbers, and two lists of them side by side.
#include "harness/trace/collective_calls.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "core/base/error.h"

namespace isoshard {
namespace {

constexpr std::size_t kColumns = 6;

bool is_alike(const CollectiveCall& a, const CollectiveCall& b) {
  return a.op == b.op && a.purpose == b.purpose && a.axis == b.axis && a.dtype == b.dtype &&
         a.reduction == b.reduction;
}

bool reduces(CollectiveOp op) {
  return op == CollectiveOp::kAllReduce || op == CollectiveOp::kReduceScatter ||
         op == CollectiveOp::kReduceScatterUneven;
}

template <class Enum>
Enum checked(std::int64_t number, Enum last) {
  if (number < 0 || number > static_cast<std::int64_t>(last))
    throw ShapeError(
        fmt::format("a row of collectives must have numbers of enumerators, got {}", number));
  return static_cast<Enum>(number);
}

}  // namespace

std::string collectives_name(Axis axis, int rank) {
  const std::string of_rank = fmt::format("{}.rank{}", name_of(axis), rank);
  return to_string(RecordName{of_rank, NameRole::kCollectives});
}

Axis axis_of_collectives(const RecordKey& key) {
  const std::string_view of_rank = parsed(key).base;
  return parse_axis(std::string(of_rank.substr(0, of_rank.find('.'))));
}

std::vector<std::int64_t> rows_of(std::span<const CollectiveCall> calls) {
  std::vector<std::int64_t> rows;
  rows.reserve(calls.size() * kColumns);
  for (const CollectiveCall& call : calls) {
    for (const auto number :
         {static_cast<std::int64_t>(call.op), static_cast<std::int64_t>(call.purpose),
          static_cast<std::int64_t>(call.axis), static_cast<std::int64_t>(call.dtype),
          static_cast<std::int64_t>(call.reduction), call.count})
      rows.push_back(number);
  }
  return rows;
}

std::vector<CollectiveCall> calls_of(std::span<const std::byte> bytes) {
  constexpr std::size_t kRow = kColumns * sizeof(std::int64_t);
  if (bytes.size() % kRow != 0)
    throw ShapeError(fmt::format("rows of collectives must have {} bytes each, got {} bytes in all",
                                 kRow, bytes.size()));
  std::vector<CollectiveCall> calls;
  for (std::size_t at = 0; at < bytes.size(); at += kRow) {
    std::int64_t row[kColumns];
    std::memcpy(row, bytes.data() + at, kRow);
    CollectiveCall& call = calls.emplace_back();
    call.op = checked(row[0], CollectiveOp::kSendRecv);
    call.purpose = checked(row[1], Purpose::kSetup);
    call.axis = checked(row[2], Axis::kDpShard);
    call.dtype = checked(row[3], Dtype::kBool);
    call.reduction = checked(row[4], Reduction::kMax);
    call.count = row[5];
  }
  return calls;
}

std::string describe(const CollectiveCall& call) {
  const std::int64_t bytes = call.count * static_cast<std::int64_t>(size_of(call.dtype));
  return fmt::format("{} ({}, {}{}) of {} bytes in {}", name_of(call.op), name_of(call.purpose),
                     name_of(call.axis),
                     reduces(call.op) ? fmt::format(", {}", name_of(call.reduction)) : "", bytes,
                     name_of(call.dtype));
}

std::optional<CallMismatch> first_mismatch(std::span<const ExpectedCall> expected,
                                           std::span<const CollectiveCall> actual,
                                           bool is_skipped) {
  const auto made = [&](const ExpectedCall& e) { return !(e.only_if_stepped && is_skipped); };
  const auto total = std::count_if(expected.begin(), expected.end(), made);
  const auto mismatch = [&](std::size_t index, const std::string& must, const std::string& got) {
    return CallMismatch{index, std::max(actual.size(), index + 1), must, got};
  };
  std::size_t next = 0;
  std::vector<const ExpectedCall*> open;  // of a row in any order, those that have not come yet
  const auto close = [&]() -> std::optional<CallMismatch> {
    while (!open.empty()) {
      const auto fits = [&](const ExpectedCall* wanted) {
        return is_alike(wanted->call, actual[next]) && wanted->call.count == actual[next].count;
      };
      const auto found =
          next == actual.size() ? open.end() : std::find_if(open.begin(), open.end(), fits);
      if (found == open.end()) {
        const std::string others =
            open.size() == 1
                ? std::string()
                : fmt::format(" or one of the {} others that may come here", open.size() - 1);
        return mismatch(next, describe(open.front()->call) + others,
                        next == actual.size()
                            ? fmt::format("nothing: the table has {} calls", total)
                            : describe(actual[next]));
      }
      open.erase(found);
      ++next;
    }
    return std::nullopt;
  };
  for (const ExpectedCall& wanted : expected) {
    if (!made(wanted)) continue;
    if (wanted.any_order) {
      open.push_back(&wanted);
      continue;
    }
    if (std::optional<CallMismatch> found = close(); found.has_value()) return found;
    std::int64_t left = wanted.call.count;
    do {
      if (next == actual.size())
        return mismatch(next, describe(wanted.call),
                        fmt::format("nothing: the table has {} calls", total));
      const CollectiveCall& call = actual[next];
      const bool fits =
          is_alike(wanted.call, call) &&
          (wanted.may_be_split && call.count > 0 ? call.count <= left : call.count == left);
      if (!fits) return mismatch(next, describe(wanted.call), describe(call));
      left -= call.count;
      ++next;
    } while (left > 0);
  }
  if (std::optional<CallMismatch> found = close(); found.has_value()) return found;
  if (next < actual.size())
    return mismatch(next, fmt::format("none: the table has {} calls", total),
                    describe(actual[next]));
  return std::nullopt;
}

}  // namespace isoshard
