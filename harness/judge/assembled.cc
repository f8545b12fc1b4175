// SPDX-License-Identifier: Apache-2.0
/// Assembling every record of a run.
#include "harness/judge/assembled.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

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
        !is_partial(record.layout) &&
        std::all_of(holders.ranks.begin(), holders.ranks.end(),
                    [&](const RankTrace& rank) { return rank.records[0].grad_scale == scale; });
    if (is_shared) {
      for (RankTrace& rank : holders.ranks) rank.records[0].grad_scale = 1;
    }
    Layout whole;
    whole.global_shape = record.layout.global_shape;
    writer.begin_step(record.key.step);
    writer.write({record.key.kind, record.key.name, std::move(whole), is_shared ? scale : 1.0},
                 holders.assemble(record.key));
  }
  Trace result{run.subject, run.case_slug, MeshShape(), {}};
  result.ranks.push_back(writer.finish());
  return result;
}

}  // namespace isoshard
