// SPDX-License-Identifier: Apache-2.0
// From traces to what is shown of them.
#include "harness/evidence/evidence.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "core/base/error.h"
#include "harness/evidence/numbers_beside.h"
#include "harness/trace/collective_calls.h"
#include "harness/trace/parts.h"

namespace isoshard {
namespace {

constexpr std::size_t kMostOfAKind = 14, kMostParts = 256, kMostRuns = 48;
constexpr int kMostRanks = 64;

/// Its name, each number of it as '*', and its kind: tensors of other layers are alike.
std::string class_of(const RecordKey& key) {
  std::string name(name_of(key.kind));
  name += ' ';
  for (std::size_t i = 0; i < key.name.size();) {
    if (key.name[i] < '0' || key.name[i] > '9') {
      name += key.name[i++];
      continue;
    }
    name += '*';
    while (i < key.name.size() && key.name[i] >= '0' && key.name[i] <= '9') ++i;
  }
  return name;
}

HeldPart held_part(const PartStats& part, bool is_flat, int rank) {
  HeldPart held{.rank = rank,
                .begin = part.box.global_offset,
                .size = part.box.size,
                .compared = part.stats.numel,
                .unequal = part.stats.unequal_values,
                .relative_error = part.stats.relative_error(),
                .max_abs = part.stats.max_abs};
  if (is_flat) {
    held.begin = {part.range.global_begin};
    held.size = {part.range.count};
  }
  return held;
}

std::optional<HeldTensor> held_tensor(const Trace& actual, const RecordKey& key) {
  HeldTensor held{.key = key, .stage = stage_of(key)};
  bool is_there = false;
  for (const RankTrace& rank : actual.ranks) {
    const Record* const record = rank.find(key);
    if (record == nullptr) continue;
    if (!is_there) {
      held.shape = record->layout.global_shape;
      held.placement = describe(record->layout);
      held.is_flat = is_flat(record->layout);
    }
    is_there = true;
    for (const PartStats& part : record->parts) {
      if (numel_of(part, is_flat(record->layout)) == 0) continue;
      if (held.parts.size() == kMostParts || rank.rank >= kMostRanks) {
        held.is_cut = true;
        break;
      }
      held.parts.push_back(held_part(part, is_flat(record->layout), rank.rank));
    }
  }
  return is_there ? std::optional(std::move(held)) : std::nullopt;
}

/// In the order in which ranks recorded them, a rank at a time: later ranks add what they alone
/// have, as the stages of a pipeline do.
std::vector<HeldTensor> placements_of(const Trace& actual) {
  constexpr std::array kKinds = {RecordKind::kParam, RecordKind::kActivation, RecordKind::kGrad,
                                 RecordKind::kOptimizer};
  std::vector<HeldTensor> placements;
  std::set<std::string> known;
  std::array<std::size_t, kKinds.size()> counts{};
  for (const RankTrace& rank : actual.ranks) {
    if (rank.rank >= kMostRanks) break;
    for (const Record& record : rank.records) {
      if (record.key.step != 0 || record.key.call != 0) continue;
      const auto* const kind = std::ranges::find(kKinds, record.key.kind);
      if (kind == kKinds.end()) continue;
      std::size_t& count = counts.at(static_cast<std::size_t>(kind - kKinds.begin()));
      if (count == kMostOfAKind || !known.insert(class_of(record.key)).second) continue;
      if (auto held = held_tensor(actual, record.key); held.has_value()) {
        placements.push_back(*std::move(held));
        ++count;
      }
    }
  }
  std::ranges::stable_sort(placements, {}, [&](const HeldTensor& held) {
    return std::ranges::find(kKinds, held.key.kind) - kKinds.begin();
  });
  return placements;
}

void add_digest(std::map<std::string, std::string>& digests, const Reference& reference,
                const char* name, auto&& is_wanted) {
  std::uint64_t digest = 0;
  bool any = false;
  for (const Record& record : reference.trace().ranks.front().records) {
    if (!is_wanted(record.key)) continue;
    for (const PartStats& part : record.parts) {
      const auto* const bytes = reinterpret_cast<const std::byte*>(&part.digest);
      digest = digest_of(bytes, sizeof part.digest, digest);
      any = any || part.digest != 0;
    }
  }
  if (any) digests[name] = fmt::format("xxh3:{:016x}", digest);
}

}  // namespace

std::vector<RankCalls> rank_calls_of(const Trace& actual) {
  std::vector<RankCalls> all;
  for (const RankTrace& rank : actual.ranks) {
    if (rank.rank >= kMostRanks) break;
    for (const Record& record : rank.records) {
      if (record.key.step != 0 || role_of(record.key) != NameRole::kCollectives || !record.kept)
        continue;
      RankCalls calls{.rank = rank.rank};
      try {
        calls.axis = axis_of_collectives(record.key);
        for (const CollectiveCall& call : calls_of(rank.tensor(record).bytes)) {
          const RankCalls::Run run{std::string(name_of(call.op)),
                                   std::string(name_of(call.purpose)),
                                   call.count * static_cast<std::int64_t>(size_of(call.dtype)), 1};
          if (!calls.runs.empty() && calls.runs.back().op == run.op &&
              calls.runs.back().purpose == run.purpose && calls.runs.back().bytes == run.bytes) {
            ++calls.runs.back().repeat;
          } else if (calls.runs.size() == kMostRuns) {
            calls.is_cut = true;
            break;
          } else {
            calls.runs.push_back(run);
          }
        }
      } catch (const Error&) {
        continue;  // what is no list of calls is a finding of its own
      }
      if (!calls.runs.empty()) all.push_back(std::move(calls));
    }
  }
  return all;
}

Evidence evidence_of(const Reference& reference, const Trace& actual,
                     std::span<const RecordKey> around, const std::optional<RecordKey>& first) {
  Evidence evidence;
  evidence.placements = placements_of(actual);
  for (const RecordKey& key : around) {
    if (auto held = held_tensor(actual, key); held.has_value())
      evidence.around.push_back(*std::move(held));
  }
  if (first.has_value()) evidence.numbers = numbers_beside(reference, actual, *first);
  evidence.calls = rank_calls_of(actual);
  if (!reference.trace().ranks.empty()) {
    add_digest(evidence.digests, reference, "initial weights", [](const RecordKey& key) {
      return key.kind == RecordKind::kParam && key.step == 0 && key.call == 0;
    });
    add_digest(evidence.digests, reference, "samples",
               [](const RecordKey& key) { return key.kind == RecordKind::kDataId; });
  }
  return evidence;
}

}  // namespace isoshard
