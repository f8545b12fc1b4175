// SPDX-License-Identifier: Apache-2.0
// Lower bounds from the shapes of a case.
#include "suite/reference/memory_needed.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/parallel/frozen_weights.h"
#include "subjects/registry/subject_spec.h"

namespace isoshard {
namespace {

constexpr double kGiB = 1 << 30;

double wide(std::int64_t size) {
  return static_cast<double>(size);
}

double num_elements(const std::vector<ParameterSpec>& specs) {
  double parameters = 0;
  for (const ParameterSpec& spec : specs) {
    double elements = 1;
    for (const std::int64_t size : spec.shape) elements *= wide(size);
    parameters += elements;
  }
  return parameters;
}

double num_tokens(const Case& c) {
  return wide(c.degrees.dp) * wide(c.batch_size) * wide(c.micro_batches) * wide(c.seq_length);
}

}  // namespace

double MemoryNeeded::total() const noexcept {
  return std::max(records + reference, ranks);
}

MemoryNeeded memory_needed(const Case& c, Recorded recorded) {
  const ModelConfig& m = c.config;
  const auto element = static_cast<double>(size_of(c.dtype));
  const std::vector<ParameterSpec> specs = make_model(c.config, c.attention)->parameters();
  const double parameters = element * num_elements(specs),
               gradients = element * num_elements(trained_of(specs, c.settings)),
               tokens = num_tokens(c), layers = wide(m.num_layers), hidden = wide(m.hidden_size);
  MemoryNeeded needed;
  if (recorded == Recorded::kEveryStep) {
    // gradients after each micro-batch and stepped weights; outputs of the modules and their
    // gradients
    const double activations = element * tokens * layers * (4 * hidden + wide(m.intermediate_size));
    needed.records =
        wide(c.steps) * (parameters + wide(c.micro_batches) * gradients + 2 * activations);
  }
  // weights and gradients; what backward starts from, where each layer is computed again; scores of
  // one layer
  const double tokens_at_once = tokens / wide(c.micro_batches);
  const bool has_scores = c.attention == AttentionImpl::kEager && m.row_nonzeros == 0;
  const double scores = has_scores ? wide(m.num_heads) * wide(c.seq_length) : 0,
               kept_forward = element * tokens_at_once * (layers * hidden + scores);
  needed.reference = parameters + gradients + kept_forward;
  // tp splits weights, and replicas over dp are those of the baseline
  const double replicas = is_baseline(c.subject) ? wide(c.degrees.dp) : 1;
  needed.ranks = (parameters + gradients) * replicas + kept_forward;
  return needed;
}

void require_memory(const Case& c, Recorded recorded, const MachineMemory& there) {
  if (there.bytes <= 0) return;  // not known
  const MemoryNeeded needed = memory_needed(c, recorded);
  if (needed.total() <= static_cast<double>(there.bytes)) return;
  throw UsageError(fmt::format(
      "{} needs at least {:.3g} GiB of memory, the machine has {:.3g} GiB: {:.3g} GiB are of the "
      "reference, {:.3g} GiB of its records of {} {}, {:.3g} GiB of the subject's ranks; take "
      "fewer tokens, layers, parameters or steps",
      c.slug(), needed.total() / kGiB, static_cast<double>(there.bytes) / kGiB,
      needed.reference / kGiB, needed.records / kGiB, c.steps, c.steps == 1 ? "step" : "steps",
      needed.ranks / kGiB));
}

}  // namespace isoshard
