// SPDX-License-Identifier: Apache-2.0
// What goes wrong between the stages of a pipeline.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/run_causes.h"

namespace isoshard::detail {
namespace {

/// The coordinate on pp of all ranks that have a record of the key; nothing if they have several.
std::optional<int> stage_rank_of(const Evidence& e, const RecordKey& key) {
  std::set<int> coordinates;
  for (const RankTrace& rank : e.actual.ranks) {
    if (rank.find(key) != nullptr)
      coordinates.insert(e.actual.mesh.coordinate(rank.rank, Axis::kPp));
  }
  return coordinates.size() == 1 ? std::optional(*coordinates.begin()) : std::nullopt;
}

/// What the reference made just before, or of gradients just after, in the same pass.
const Record* neighbor_of(const Evidence& e) {
  const std::vector<Record>& records = e.reference.trace().ranks.at(0).records;
  const RecordKey& key = e.wanted.key;
  const Record* before = nullptr;
  for (const Record& record : records) {
    if (record.key == key) return before;
    if (record.key.kind == key.kind && record.key.step == key.step && record.key.call == key.call)
      before = &record;
  }
  return nullptr;
}

/// "of micro-batch 2 only": the calls of the tensor that are wrong, if others are right.
std::string wrong_calls(const Evidence& e) {
  std::vector<int> wrong;
  int all = 0;
  for (RecordKey key = e.wanted.key; all < e.num_micro_batches(); ++all) {
    key.call = all;
    if (!e.is_right(key)) wrong.push_back(all);
  }
  if (wrong.empty() || std::cmp_equal(wrong.size(), all)) return "";
  return fmt::format(", in micro-batch{} {} only", wrong.size() == 1 ? "" : "es",
                     fmt::join(wrong, ", "));
}

}  // namespace

std::string cause_in_handover(const Evidence& e) {
  const RecordKind kind = e.wanted.key.kind;
  if (e.actual.mesh.degree(Axis::kPp) == 1 ||
      (kind != RecordKind::kActivation && kind != RecordKind::kActivationGrad))
    return "";
  const Record* const before = neighbor_of(e);
  if (before == nullptr) return "";
  const std::optional<int> own = stage_rank_of(e, e.wanted.key);
  const std::optional<int> other = stage_rank_of(e, before->key);
  if (!own.has_value() || !other.has_value() || own == other || !e.is_right(before->key)) return "";
  return fmt::format(
      "pp rank {} received something other than what pp rank {} made{}: {} is the last right "
      "tensor there; did the buffer change while it was sent?",
      *own, *other, wrong_calls(e), describe(before->key));
}

}  // namespace isoshard::detail
