// SPDX-License-Identifier: Apache-2.0
#include "harness/judge/rules/no_evidence.h"

#include <algorithm>
#include <map>
#include <optional>

#include "harness/trace/numbers.h"
#include "harness/trace/stage.h"

namespace isoshard::detail {
namespace {

/// The last step of which a forward pass was recorded; -1: none.
int last_forward(const std::vector<Record>& records) {
  int last = -1;
  for (const Record& record : records)
    if (record.key.kind == RecordKind::kActivation) last = std::max(last, record.key.step);
  return last;
}

bool is_constant(const Reference& reference, const Record& record) {
  const std::int64_t numel = numel_of(record.layout.global_shape);
  if (numel < 2) return false;
  const std::byte* const bytes = reference.bytes(record);
  const double first = value_at(bytes, record.dtype, 0);
  for (std::int64_t i = 1; i < numel; ++i)
    if (value_at(bytes, record.dtype, i) != first) return false;
  return true;
}

}  // namespace

std::vector<std::string> zero_tensors(const std::vector<TensorComparison>& tensors) {
  std::vector<std::string> zeros;
  for (const TensorComparison& t : tensors) {
    if (t.key.kind != RecordKind::kScalar && is_zero(t)) zeros.push_back(describe(t.key));
  }
  return zeros;
}

std::vector<std::string> constant_parameters(const Reference& reference) {
  if (!reference.has_bytes()) return {};
  const std::vector<Record>& records = reference.trace().ranks.at(0).records;
  const int last = last_forward(records);
  std::map<std::string, bool> parameters;
  for (const Record& record : records) {
    const RecordKey& key = record.key;
    if (key.kind != RecordKind::kParam || role_of(key) == NameRole::kReadAgain) continue;
    const bool is_read = stage_of(key) == Stage::kParametersRead || key.step < last;
    if (!is_read) continue;
    bool& constant = parameters.try_emplace(key.name, true).first->second;
    constant = constant && is_constant(reference, record);
  }
  std::vector<std::string> names;
  for (const auto& [name, constant] : parameters)
    if (constant) names.push_back(name);
  return names;
}

bool reads_updated_weights(const Reference& reference) {
  const std::vector<Record>& records = reference.trace().ranks.at(0).records;
  std::optional<int> first_step;
  for (const Record& record : records) {
    if (stage_of(record.key) == Stage::kParameterAfterStep &&
        (!first_step || record.key.step < *first_step))
      first_step = record.key.step;
  }
  return !first_step || last_forward(records) > *first_step;
}

}  // namespace isoshard::detail
