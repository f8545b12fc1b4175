// SPDX-License-Identifier: Apache-2.0
// Ranks, and names without their layers.
#include "harness/judge/records/presence.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "core/observe/layer_name.h"
#include "harness/judge/steps/skipped_steps.h"
#include "harness/trace/run_view.h"
#include "harness/trace/wanted_record.h"

namespace isoshard::detail {
namespace {

/// Ranks that hold nothing of a tensor by its layout need not record it.
bool is_excused(const Layout& layout, const MeshShape& mesh, int rank) {
  return std::ranges::any_of(layout.placements, [&](const Placement& placement) {
    return leaves_out(placement, mesh.coordinate(rank, placement.axis));
  });
}

/// "model.layers.*.mlp" of every layer's.
std::string without_layer(const std::string& name) {
  const std::optional<LayerInName> layer = layer_in(name);
  return layer.has_value() ? name.substr(0, layer->begin) + "*" + name.substr(layer->end) : name;
}

}  // namespace

void Counted::add(const RecordKey& key) {
  if (number++ == 0) first = describe(key);
}

std::string Counted::words(std::string_view noun, std::string_view which,
                           std::string_view verb) const {
  return fmt::format("{} {}{} {}{} not {}, first {}", number, noun, number == 1 ? "" : "s", which,
                     number == 1 ? "was" : "were", verb, first);
}

Rule missing_ranks(const Trace& run) {
  std::vector<int> missing;
  for (int rank = 0; rank < run.mesh.world_size(); ++rank) {
    if (std::ranges::count(run.ranks, rank, &RankTrace::rank) != 1) missing.push_back(rank);
  }
  if (missing.empty() && run.ranks.size() == static_cast<std::size_t>(run.mesh.world_size()))
    return {};
  return said(
      RuleId::kRanksMissing,
      {{"ranks", run.ranks.size()}, {"world_size", run.mesh.world_size()}, {"missing", missing}});
}

std::vector<int> absent_ranks(const Trace& run, const std::vector<Held>& held) {
  std::vector<int> absent;
  for (int rank = 0; rank < run.mesh.world_size(); ++rank) {
    const bool is_there =
        std::ranges::any_of(held, [&](const Held& h) { return h.rank->rank == rank; });
    if (!is_there && !is_excused(held.front().record->layout, run.mesh, rank))
      absent.push_back(rank);
  }
  return absent;
}

std::vector<int> ranks_near(const Trace& run, const RecordKey& key) {
  const std::string module = key.name.substr(0, key.name.rfind('.'));
  std::vector<int> ranks;
  for (const RankTrace& rank : run.ranks) {
    const bool has_some = std::ranges::any_of(rank.records, [&](const Record& record) {
      return record.key.step == key.step && record.key.name.starts_with(module) &&
             (record.key.name.size() == module.size() || record.key.name[module.size()] == '.');
    });
    if (has_some && module.size() < key.name.size()) ranks.push_back(rank.rank);
  }
  return ranks;
}

OptionalRecords::OptionalRecords(const Reference& reference, const Trace& run,
                                 const JudgePolicy& policy)
    : reference_(reference), policy_(policy) {
  for (const RankTrace& rank : run.ranks) {
    for (const Record& record : rank.records) {
      const RecordKey& key = record.key;
      recorded_.insert(key);
      const bool is_micro_batch = role_of(key) == NameRole::kMicroBatch;
      has_micro_batches_ = has_micro_batches_ || is_micro_batch;
      has_clipped_ = has_clipped_ || role_of(key) == NameRole::kClipped;
      if (is_micro_batch || role_of(key) == NameRole::kSummand)
        likes_.insert({key.kind, without_layer(key.name)});
    }
  }
}

bool OptionalRecords::has_like(const RecordKey& key) const {
  return likes_.contains({key.kind, without_layer(key.name)});
}

bool OptionalRecords::may_be_left_out(const RecordKey& key) const {
  if (role_of(key) == NameRole::kHyperparameters) return true;
  return role_of(key) == NameRole::kMicroBatch && !has_like(key);
}

bool OptionalRecords::may_be_added(const RecordKey& key) const {
  return role_of(key) == NameRole::kHyperparameters;
}

std::vector<RecordKey> OptionalRecords::missing() const {
  std::vector<RecordKey> missing;
  for (const Record& record : reference_.trace().ranks.at(0).records) {
    RecordKey key = record.key;
    if (!recorded_.contains(key)) continue;
    if (key.kind == RecordKind::kGrad && has_clipped_ && !is_gradient_besides(key) &&
        !RunView(reference_).is_skipped(key.step)) {
      key.name = to_string(RecordName{key.name, NameRole::kClipped});
    } else if (key.kind == RecordKind::kActivation) {
      // Not of their gradients: where nothing before a module is trained there are none.
      key.name = to_string(RecordName{key.name, NameRole::kSummand});
      if (!has_like(key)) continue;
    } else {
      continue;
    }
    if (!recorded_.contains(key) && !matches_any(policy_.not_recorded, key) &&
        !policy_.left_out.contains(key) && wanted_of(reference_, key, policy_).has_value())
      missing.push_back(key);
  }
  return missing;
}

}  // namespace isoshard::detail
