// SPDX-License-Identifier: Apache-2.0
// Tensors that are cut beside tensors that are not.
#include "harness/judge/records/claimed_shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>

#include "core/comm/collective.h"
#include "harness/ids/rule.h"
#include "harness/trace/parts.h"

namespace isoshard::detail {
namespace {

namespace fs = std::filesystem;

constexpr std::array kAxesOfData = {Axis::kDp, Axis::kDpReplicate, Axis::kDpShard, Axis::kCp};

using HeldPlace = std::tuple<Shape, Shape, std::int64_t, std::int64_t>;

/// What a rank holds of a tensor.
using HeldPlaces = std::set<HeldPlace>;

HeldPlaces places_of(const Record& record) {
  HeldPlaces places;
  for (const PartStats& part : record.parts) {
    if (numel_of(part, is_flat(record.layout)) == 0) continue;
    places.insert(
        {part.box.global_offset, part.box.size, part.range.global_begin, part.range.count});
  }
  return places;
}

/// Tensors that a system treats alike: step, kind, and what of a parameter they are ("exp_avg",
/// "clipped", "read").
using ClaimedGroup = std::tuple<int, RecordKind, std::string>;

/// Of one axis: the smallest tensor that is cut along it, and the largest of which there are
/// copies.
struct CutAndCopied {
  const Record* cut = nullptr;
  const Record* copied = nullptr;
};

std::int64_t elements_of(const Record& record) {
  return numel_of(record.layout.global_shape);
}

class Claims {
 public:
  Claims(const Trace& run, const JudgePolicy& policy, const std::vector<std::string>& allowed)
      : run_(run), policy_(policy) {
    std::set<std::string> trained;
    for (const RankTrace& rank : run.ranks) {
      for (const Record& record : rank.records) {
        if (record.key.kind == RecordKind::kGrad && !is_gradient_besides(record.key))
          trained.insert(record.key.name);
      }
    }
    for (const RankTrace& rank : run.ranks) {
      for (const Record& record : rank.records) {
        if (is_asked(record, trained) && !matches_any(allowed, record.key))
          held_[record.key].push_back({rank.rank, &record});
      }
    }
  }

  void require(const fs::path& file) const {
    for (const Axis axis : kAxesOfData) {
      if (run_.mesh.degree(axis) < 2) continue;
      std::map<ClaimedGroup, CutAndCopied> groups;
      for (const auto& [key, held] : held_) add(axis, held, groups[group_of(key)]);
      for (const auto& [group, found] : groups) require_one(axis, found, file);
    }
  }

 private:
  struct HeldBy {
    int rank;
    const Record* record;
  };

  /// Frozen parameters are held as they like: they cannot drift.
  static bool is_asked(const Record& record, const std::set<std::string>& trained) {
    const RecordKey& key = record.key;
    if (key.kind != RecordKind::kParam && key.kind != RecordKind::kGrad &&
        key.kind != RecordKind::kOptimizer)
      return false;
    if (elements_of(record) < 2) return false;
    return key.kind != RecordKind::kParam || trained.contains(base_of(key).name);
  }

  static ClaimedGroup group_of(const RecordKey& key) {
    std::string what(parsed(key).state);
    if (role_of(key) == NameRole::kClipped) what = "clipped";
    if (role_of(key) == NameRole::kMicroBatch) what = "micro_batch";
    if (role_of(key) == NameRole::kReadAgain || (key.step == 0 && key.call == 0)) what += "read";
    return {key.step, key.kind, std::move(what)};
  }

  void add(Axis axis, const std::vector<HeldBy>& held, CutAndCopied& extremes) const {
    const Record& first = *held.front().record;
    const Placement* const own = first.layout.find(axis);
    if (own != nullptr && own->kind == Placement::Kind::kPartial) return;
    bool is_cut = false, is_copied = false;
    std::map<int, HeldPlaces> of_line;  // by the first rank of the line
    for (const HeldBy& h : held) {
      const HeldPlaces places = places_of(*h.record);
      if (places.empty()) continue;
      const auto [known, is_first] =
          of_line.emplace(run_.mesh.group_of(h.rank, axis).front(), places);
      if (is_first) continue;
      (known->second == places ? is_copied : is_cut) = true;
    }
    if (is_cut && (extremes.cut == nullptr || elements_of(first) < elements_of(*extremes.cut)))
      extremes.cut = &first;
    if (!is_cut && is_copied &&
        (extremes.copied == nullptr || elements_of(first) > elements_of(*extremes.copied)))
      extremes.copied = &first;
  }

  void require_one(Axis axis, const CutAndCopied& found, const fs::path& file) const {
    if (found.cut == nullptr) return;
    const std::string cut = describe(found.cut->key);
    if (found.copied != nullptr && elements_of(*found.copied) >= elements_of(*found.cut))
      refuse(
          file, RuleId::kCutBesideCopies,
          {{"tensor", cut},
           {"axis", name_of(axis)},
           {"copied", describe(found.copied->key)},
           {"pattern", fmt::format("{}/{}", name_of(found.cut->key.kind), found.cut->key.name)}});
    if (policy_.collectives && !is_gathered_along(axis))
      refuse(file, RuleId::kCutButNeverGathered,
             {{"tensor", cut}, {"axis", name_of(axis)}, {"subject", run_.subject}});
  }

  /// Whether ranks call anything along an axis that moves parts and does not add up.
  bool is_gathered_along(Axis axis) const {
    std::set<int> steps;
    for (const auto& [key, held] : held_) steps.insert(key.step);
    for (const RankTrace& rank : run_.ranks) {
      for (const int step : steps) {
        for (const Axis called : {axis, Axis::kDp, Axis::kWorld}) {
          const std::vector<ExpectedCall> calls = policy_.collectives(rank.rank, step, called);
          if (std::ranges::any_of(calls, [](const ExpectedCall& expected) {
                return expected.call.op != CollectiveOp::kAllReduce &&
                       expected.call.op != CollectiveOp::kBarrier;
              }))
            return true;
        }
      }
    }
    return false;
  }

  const Trace& run_;
  const JudgePolicy& policy_;
  std::map<RecordKey, std::vector<HeldBy>> held_;
};

}  // namespace

void require_consistent_shards(const Trace& run, const JudgePolicy& policy,
                               const std::vector<std::string>& allowed, const fs::path& file) {
  Claims(run, policy, allowed).require(file);
}

}  // namespace isoshard::detail
