// SPDX-License-Identifier: Apache-2.0
/// Assembling every record of a run.
#include "harness/judge/assembled.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/observe/layer_name.h"
#include "harness/trace/record_writer.h"

namespace isoshard {
namespace {

/// Replicas are stored once, but a sharded tensor is as large as all its shards: the sum is enough
/// in any case.
std::size_t bytes_needed(const Trace& run) {
  std::size_t bytes = 64;
  for (const RankTrace& rank : run.ranks) {
    for (const Record& record : rank.records) bytes += static_cast<std::size_t>(record.bytes) + 64;
  }
  return bytes;
}

/// Values that are made while a micro-batch goes through the layers.
bool is_of_a_pass(RecordKind kind) {
  return kind == RecordKind::kActivation || kind == RecordKind::kActivationGrad ||
         kind == RecordKind::kMask;
}

using Index = std::map<RecordKey, const Record*>;

std::vector<Index> indices_of(const Trace& run) {
  std::vector<Index> indices;
  for (const RankTrace& rank : run.ranks) {
    Index& index = indices.emplace_back();
    for (const Record& record : rank.records) index.emplace(record.key, &record);
  }
  return indices;
}

/// One record, as each rank has it.
Trace holders_of(const Trace& run, const std::vector<Index>& indices, const RecordKey& key) {
  Trace holders{run.subject, run.case_slug, run.mesh, {}};
  for (std::size_t r = 0; r < run.ranks.size(); ++r) {
    const auto found = indices[r].find(key);
    if (found != indices[r].end())
      holders.ranks.push_back({run.ranks[r].rank, {*found->second}, run.ranks[r].arena});
  }
  return holders;
}

/// One kind of value in one pass of a micro-batch.
using Pass = std::tuple<int, RecordKind, int>;  // step, kind, call

Pass pass_of(const RecordKey& key) {
  return {key.step, key.kind, key.call};
}

/// Twice the number of the layer that a record belongs to; embedding and head stand before and
/// behind the layers of their rank. By record; nothing if names do not tell.
std::map<const Record*, long> places_in_layers(const Trace& run) {
  std::map<const Record*, long> places;
  std::set<std::string_view> stacks;  // "model.layers."
  for (const RankTrace& rank : run.ranks) {
    std::map<Pass, std::vector<const Record*>> passes;
    for (const Record& record : rank.records) {
      if (is_of_a_pass(record.key.kind)) passes[pass_of(record.key)].push_back(&record);
    }
    for (const auto& [pass, records] : passes) {
      const bool is_backward = std::get<RecordKind>(pass) == RecordKind::kActivationGrad;
      std::vector<std::optional<long>> layers;
      for (const Record* record : records) {
        const auto layer = layer_in(record->key.name);
        if (layer.has_value())
          stacks.insert(std::string_view(record->key.name).substr(0, layer->begin));
        layers.push_back(layer.has_value() ? std::optional(2 * layer->number) : std::nullopt);
      }
      const auto first = std::ranges::find_if(layers, [](const auto& l) { return l.has_value(); });
      if (first == layers.end()) continue;
      const auto last = std::find_if(layers.rbegin(), layers.rend(), [](const auto& l) {
                          return l.has_value();
                        }).base();
      long place = **first + (is_backward ? 1 : -1);
      for (auto layer = layers.begin(); layer != layers.end(); ++layer) {
        if (layer->has_value()) place = **layer;
        if (layer == last) place += is_backward ? -1 : 1;
        places[records[static_cast<std::size_t>(layer - layers.begin())]] = place;
      }
    }
  }
  return stacks.size() == 1 ? places : std::map<const Record*, long>{};
}

/// A rank counts what it records itself, so what two stages made stands side by side. Here the
/// values of each kind change places among themselves.
void put_stages_in_order(const Trace& run, std::vector<const Record*>& records) {
  const std::map<const Record*, long> places = places_in_layers(run);
  std::map<std::pair<int, RecordKind>, std::vector<std::size_t>> kinds;
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (places.contains(records[i]))
      kinds[{records[i]->key.step, records[i]->key.kind}].push_back(i);
  }
  for (const auto& [kind, slots] : kinds) {
    const long sign = kind.second == RecordKind::kActivationGrad ? -1 : 1;
    std::vector<const Record*> sorted;
    for (const std::size_t slot : slots) sorted.push_back(records[slot]);
    std::ranges::stable_sort(sorted, {}, [&](const Record* record) {
      return std::pair(record->key.call, sign * places.at(record));
    });
    for (std::size_t i = 0; i < slots.size(); ++i) records[slots[i]] = sorted[i];
  }
}

/// The first holder's record of each tensor, in execution order: rank 0's, and between them what
/// only other ranks have.
std::vector<const Record*> first_records(const Trace& run) {
  std::set<RecordKey> seen;
  std::vector<const Record*> first;
  for (const RankTrace& rank : run.ranks) {
    for (const Record& record : rank.records) {
      if (seen.insert(record.key).second) first.push_back(&record);
    }
  }
  std::stable_sort(first.begin(), first.end(), [](const Record* a, const Record* b) {
    return std::pair(a->key.step, a->order) < std::pair(b->key.step, b->order);
  });
  if (run.mesh.degree(Axis::kPp) > 1) put_stages_in_order(run, first);
  return first;
}

}  // namespace

Trace assembled(const Trace& run) {
  RecordOptions options;
  options.keep = Keep::kEverything;
  options.arena = std::make_shared<Arena>(bytes_needed(run), "assembled");
  RecordWriter writer(options);
  const std::vector<Index> indices = indices_of(run);
  for (const Record* first : first_records(run)) {
    const Record& record = *first;
    Trace holders = holders_of(run, indices, record.key);
    const double scale = record.grad_scale;
    const bool is_shared =
        std::all_of(holders.ranks.begin(), holders.ranks.end(),
                    [&](const RankTrace& rank) { return rank.records[0].grad_scale == scale; });
    Layout whole;
    whole.global_shape = record.layout.global_shape;
    writer.begin_step(record.key.step);
    writer.write({record.key.kind, record.key.name, std::move(whole), is_shared ? scale : 1.0},
                 holders.assemble(record.key, is_shared ? scale : 1.0));
  }
  Trace result{run.subject, run.case_slug, MeshShape(), {}};
  result.ranks.push_back(writer.finish());
  return result;
}

}  // namespace isoshard
