// SPDX-License-Identifier: Apache-2.0
/// Which rows of logits have a target.
#include "harness/causes/view/targets.h"

#include <algorithm>

namespace isoshard::detail {

std::vector<const Record*> labels_of_step(const Evidence& e) {
  std::vector<const Record*> found;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    if (record.key.kind == RecordKind::kDataId && record.key.name == "labels" &&
        record.key.step == e.wanted.key.step && record.layout.global_shape.size() == 2 &&
        !is_floating(record.dtype))
      found.push_back(&record);
  }
  return found;
}

const Record* logits_beside(const Evidence& e, const Record& labels) {
  const Record* found = nullptr;
  for (const Record& record : e.reference.trace().ranks.at(0).records) {
    const Shape& shape = record.layout.global_shape;
    if (record.key.kind == RecordKind::kActivation && record.key.step == labels.key.step &&
        record.key.call == labels.key.call && shape.size() == 3 &&
        std::equal(shape.begin(), shape.begin() + 2, labels.layout.global_shape.begin()))
      found = &record;
  }
  return found;
}

bool are_few_logits(const Evidence& e, const std::vector<const Record*>& labels) {
  constexpr std::int64_t kMost = std::int64_t{1} << 24;  // 128 MiB a copy
  std::int64_t numel = 0;
  for (const Record* const record : labels) {
    const Record* const head = logits_beside(e, *record);
    if (head != nullptr) numel += numel_of(head->layout.global_shape);
  }
  return numel <= kMost;
}

std::vector<Target> targets_in(const Values& labels, std::int64_t vocabulary) {
  const Values own = labels.contiguous();
  const std::int64_t length = own.size(1);
  std::vector<Target> targets;
  for (std::int64_t row = 0; row < own.numel(); ++row) {
    const std::int64_t token = row % length;
    if (token + 1 == length) continue;
    const double target = own.flat()[static_cast<std::size_t>(row) + 1];
    if (target < 0 || target >= static_cast<double>(vocabulary)) continue;
    targets.push_back({row / length, token, row, static_cast<std::int64_t>(target)});
  }
  return targets;
}

}  // namespace isoshard::detail
