// SPDX-License-Identifier: Apache-2.0
/// Whether parameters' gradients clear those of activations.
#include "harness/judge/noted_taps.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "core/mesh/mesh_words.h"
#include "harness/trace/collective_calls.h"
#include "harness/trace/stage.h"

namespace isoshard::detail {
namespace {

/// So much more must an activation gradient be off than a parameter's gradient may be.
constexpr double kMargin = 10;

using Compared = std::map<RecordKey, const TensorComparison*>;

bool is_sound(const TensorComparison& t) {
  return t.within && t.weakness.empty() && t.stats.numel > 0 && t.level != Level::kReported;
}

/// Keys of the gradients that all parameters must have: those that are read, in each step.
std::set<RecordKey> demanded_gradients(const Reference& reference) {
  std::set<std::string> parameters;
  std::set<int> steps;
  for (const Record& record : reference.trace().ranks.at(0).records) {
    steps.insert(record.key.step);
    if (record.key.kind == RecordKind::kParam && stage_of(record.key) == Stage::kParametersRead)
      parameters.insert(record.key.name);
  }
  std::set<RecordKey> keys;
  for (const int step : steps) {
    for (const std::string& name : parameters) keys.insert({step, RecordKind::kGrad, name, 0});
  }
  return keys;
}

/// Whether all that the reference records was compared.
bool is_covered(const Reference& reference, const Compared& compared) {
  return std::ranges::all_of(reference.trace().ranks.at(0).records, [&](const Record& record) {
    const RecordKey& key = record.key;
    return key.kind == RecordKind::kScalar || is_own_repetition(key) ||
           role_of(key) == NameRole::kCollectives || role_of(key) == NameRole::kMicroBatch ||
           compared.contains(key);
  });
}

}  // namespace

std::string note_on_taps(const Reference& reference, const MeshShape& mesh,
                         const std::vector<TensorComparison>& tensors,
                         const std::vector<const Finding*>& findings) {
  Compared compared;
  for (const TensorComparison& t : tensors) compared[t.key] = &t;
  const std::set<RecordKey> gradients = demanded_gradients(reference);
  if (findings.empty() || gradients.empty() || !is_covered(reference, compared)) return "";
  std::map<int, double> allowed;  // the largest of each step
  for (const RecordKey& key : gradients) {
    const auto found = compared.find(key);
    if (found == compared.end() || !is_sound(*found->second)) return "";
    if (!found->second->insensitive)
      allowed[key.step] = std::max(allowed[key.step], found->second->allowed_relative_error);
  }
  for (const Finding* finding : findings) {
    const auto found = compared.find(finding->key);
    if (finding->key.kind != RecordKind::kActivationGrad || found == compared.end()) return "";
    const Stats& stats = found->second->stats;
    const Record* const whole = reference.find(finding->key);
    const bool is_whole =
        whole != nullptr && stats.numel > 0 && stats.numel == numel_of(whole->layout.global_shape);
    const auto most = allowed.find(finding->key.step);
    if (!is_whole || stats.nonfinite_mismatch > 0 || most == allowed.end()) return "";
    const double error = stats.relative_error();
    if (!std::isfinite(error) || !(error >= kMargin * most->second)) return "";
  }
  const Finding& first = *findings.front();
  return fmt::format(
      "{} activation gradient{} alone differ{}, first {}{}, and all {} gradients of parameters are "
      "right: they were recorded in front of a hook of the framework's own, or reach no parameter",
      findings.size(), findings.size() == 1 ? "" : "s", findings.size() == 1 ? "s" : "", first.what,
      on_ranks(first.ranks, mesh), gradients.size());
}

}  // namespace isoshard::detail
