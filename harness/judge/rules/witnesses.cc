// SPDX-License-Identifier: Apache-2.0
#include "harness/judge/rules/witnesses.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "harness/trace/parts.h"
#include "harness/trace/stage.h"

namespace isoshard::detail {
namespace {

/// Where a part lies, and what it holds.
using PlacedDigest = std::tuple<Shape, Shape, std::int64_t, std::int64_t, std::uint64_t>;
using PlacedDigests = std::vector<PlacedDigest>;

bool splits_batch(Axis axis) {
  return axis == Axis::kDp || axis == Axis::kDpReplicate || axis == Axis::kDpShard ||
         axis == Axis::kCp;
}

/// Samples, and what a forward or backward pass computes from them: losses and sums over ranks
/// among it.
bool is_of_samples(const Record& record) {
  const Stage stage = stage_of(record.key);
  return stage == Stage::kDataIds || stage == Stage::kForward || stage == Stage::kActivationGrad ||
         stage == Stage::kMasks || (stage == Stage::kParameterGrad && is_partial(record.layout));
}

/// What depends on the work of ranks. Samples differ between ranks whatever these do with them, so
/// they and losses show only that ranks along a batch's axis have other ones.
bool may_be_witness(const Record& record, Axis axis) {
  switch (stage_of(record.key)) {
    case Stage::kDataIds:
      return splits_batch(axis);
    case Stage::kForward:
      return splits_batch(axis) || record.key.kind != RecordKind::kScalar;
    case Stage::kActivationGrad:
    case Stage::kMasks:
    case Stage::kParametersRead:
    case Stage::kParameterGrad:
    case Stage::kClippedGrad:
    case Stage::kOptimizerState:
    case Stage::kParameterAfterStep:
      return true;
    default:
      return false;
  }
}

/// Whether it is not zero everywhere. Digests alone do not say.
bool is_evidence(const Record& record) {
  return std::ranges::any_of(record.parts, [](const PartStats& part) {
    return part.stats.numel == 0 || part.stats.sum_sq_actual != 0;
  });
}

PlacedDigests parts_held(const Record& record) {
  const bool flat = is_flat(record.layout);
  PlacedDigests parts;
  for (const PartStats& part : record.parts) {
    if (numel_of(part, flat) == 0) continue;
    if (flat)
      parts.emplace_back(Shape(), Shape(), part.range.global_begin, part.range.count, part.digest);
    else
      parts.emplace_back(part.box.global_offset, part.box.size, 0, 0, part.digest);
  }
  return parts;
}

std::set<std::uint64_t> contents_of(const PlacedDigests& parts) {
  std::set<std::uint64_t> digests;
  for (const PlacedDigest& part : parts) digests.insert(std::get<4>(part));
  return digests;
}

/// Whether two ranks hold other parts with other contents, or other summands.
bool differ(const Record& a, const Record& b) {
  const PlacedDigests first = parts_held(a), second = parts_held(b);
  if (first.empty() || second.empty() || contents_of(first) == contents_of(second)) return false;
  const auto place = [](const PlacedDigest& part) {
    return std::tuple(std::get<0>(part), std::get<1>(part), std::get<2>(part), std::get<3>(part));
  };
  return is_partial(a.layout) || !std::ranges::equal(first, second, {}, place, place);
}

/// Which pairs of an axis's coordinates something tells apart.
class Pairs {
 public:
  explicit Pairs(int degree) : degree_(degree), apart_(static_cast<std::size_t>(degree * degree)) {}

  bool is_apart(int a, int b) const { return apart_[at(a, b)]; }
  void set_apart(int a, int b) { apart_[at(a, b)] = true; }

  /// The first pair that nothing tells apart.
  std::optional<std::pair<int, int>> alike() const {
    for (int b = 1; b < degree_; ++b)
      for (int a = 0; a < b; ++a)
        if (!is_apart(a, b)) return std::pair(a, b);
    return std::nullopt;
  }

 private:
  std::size_t at(int a, int b) const {
    return static_cast<std::size_t>(std::min(a, b) * degree_ + std::max(a, b));
  }

  int degree_;
  std::vector<bool> apart_;
};

class WitnessSearch {
 public:
  WitnessSearch(const Trace& run, const std::map<RecordKey, std::vector<Held>>& held)
      : run_(run), held_(held) {}

  AxisWitness along(const AxisDegree& axis) const {
    const bool needs_samples = splits_batch(axis.axis);
    const bool has_samples = std::ranges::any_of(
        held_, [](const auto& entry) { return is_of_samples(*entry.second.front().record); });
    AxisWitness witness{axis.axis, axis.degree, {}, {}, has_samples || !needs_samples};
    Pairs pairs(axis.degree);
    std::map<std::vector<bool>, std::string> absences;
    for (const auto& [key, held] : held_) {
      if (!pairs.alike().has_value()) break;
      if (!may_be_witness(*held.front().record, axis.axis)) continue;
      if (needs_samples && !is_of_samples(*held.front().record)) continue;
      if (!has_evidence(held) || is_without_effect(key)) continue;
      if (tells_apart(axis.axis, held, pairs) && witness.tensor.empty())
        witness.tensor = describe(key);
      // An optimizer that is shared out says nothing of the work.
      if (needs_samples || key.kind == RecordKind::kOptimizer) continue;
      // Stages of a pipeline, and experts, are whole tensors, each on its own ranks.
      const std::vector<bool> there = presence(axis, held);
      if (std::ranges::find(there, false) == there.end()) continue;
      if (!absences.try_emplace(there, describe(key)).second) continue;
      for (const auto& [other, tensor] : absences) {
        if (tells_apart(other, there, pairs) && witness.tensor.empty())
          witness.tensor = tensor + ", " + describe(key);
      }
    }
    witness.alike = pairs.alike();
    return witness;
  }

 private:
  static bool has_evidence(const std::vector<Held>& held) {
    return std::ranges::any_of(held, [](const Held& h) { return is_evidence(*h.record); });
  }

  /// Whether the loss does not depend on a tensor: its gradient in the same step is zero.
  bool is_without_effect(const RecordKey& key) const {
    const bool is_output = key.kind == RecordKind::kActivation;
    if (!is_output && key.kind != RecordKind::kParam && key.kind != RecordKind::kOptimizer)
      return false;
    const RecordKey gradient =
        is_output ? RecordKey{key.step, RecordKind::kActivationGrad, key.name, key.call}
                  : RecordKey{key.step, RecordKind::kGrad, std::string(parsed(key).base), 0};
    const auto found = held_.find(gradient);
    return found != held_.end() && !has_evidence(found->second);
  }

  /// Notes pairs of ranks that differ, and have all coordinates but that of the axis in common.
  /// Along an axis that splits the batch, samples differ from none. Returns whether a pair is new.
  bool tells_apart(Axis axis, const std::vector<Held>& held, Pairs& pairs) const {
    std::map<int, std::vector<const Held*>> groups;  // by the first rank of a group
    for (const Held& one : held)
      groups[run_.mesh.group_of(one.rank->rank, axis).front()].push_back(&one);
    bool is_any = false;
    for (const auto& [first, group] : groups) {
      for (std::size_t i = 0; i < group.size(); ++i) {
        for (std::size_t j = i + 1; j < group.size(); ++j) {
          const int a = run_.mesh.coordinate(group[i]->rank->rank, axis);
          const int b = run_.mesh.coordinate(group[j]->rank->rank, axis);
          if (a == b || pairs.is_apart(a, b)) continue;
          const Record &one = *group[i]->record, &other = *group[j]->record;
          const bool is_one_empty = parts_held(one).empty() != parts_held(other).empty();
          if (!differ(one, other) && !(splits_batch(axis) && is_one_empty)) continue;
          pairs.set_apart(a, b);
          is_any = true;
        }
      }
    }
    return is_any;
  }

  /// The same for two tensors that some coordinates have nothing of: a pair of which each has one
  /// that the other has not.
  static bool tells_apart(const std::vector<bool>& one, const std::vector<bool>& other,
                          Pairs& pairs) {
    bool is_any = false;
    const int degree = static_cast<int>(one.size());
    for (int a = 0; a < degree; ++a) {
      for (int b = 0; b < degree; ++b) {
        const auto i = static_cast<std::size_t>(a), j = static_cast<std::size_t>(b);
        if (!one[i] || one[j] || other[i] || !other[j] || pairs.is_apart(a, b)) continue;
        pairs.set_apart(a, b);
        is_any = true;
      }
    }
    return is_any;
  }

  /// By coordinate, whether some rank has elements of it.
  std::vector<bool> presence(const AxisDegree& axis, const std::vector<Held>& held) const {
    std::vector<bool> there(static_cast<std::size_t>(axis.degree));
    for (const Held& h : held) {
      if (!parts_held(*h.record).empty())
        there[static_cast<std::size_t>(run_.mesh.coordinate(h.rank->rank, axis.axis))] = true;
    }
    return there;
  }

  const Trace& run_;
  const std::map<RecordKey, std::vector<Held>>& held_;
};

}  // namespace

std::map<RecordKey, std::vector<Held>> held_by_ranks(const Trace& run) {
  std::map<RecordKey, std::vector<Held>> held;
  for (const RankTrace& rank : run.ranks) {
    for (const Record& record : rank.records) held[record.key].push_back({&rank, &record});
  }
  return held;
}

std::vector<AxisWitness> witnesses_of(const Trace& run,
                                      const std::map<RecordKey, std::vector<Held>>& held,
                                      const std::set<Axis>& may_be_unused) {
  std::vector<AxisWitness> witnesses;
  const WitnessSearch search(run, held);
  for (const AxisDegree& axis : run.mesh.axes())
    if (axis.degree > 1) witnesses.push_back(search.along(axis));
  for (AxisWitness& witness : witnesses)
    witness.is_demanded = witness.is_demanded && !may_be_unused.contains(witness.axis);
  return witnesses;
}

}  // namespace isoshard::detail
