// SPDX-License-Identifier: Apache-2.0
// Each rank's records pass a writer of their own once more.
#include "harness/judge/replay.h"

#include <fmt/format.h>

#include <memory>

#include "harness/trace/record_writer.h"

namespace isoshard {
namespace {

std::size_t bytes_needed(const RankTrace& rank) {
  std::size_t bytes = 64;
  for (const Record& record : rank.records) bytes += static_cast<std::size_t>(record.bytes) + 64;
  return bytes;
}

/// Rules that look at a run's own tensors need those that are within their tolerances, too. They
/// are kept if all of them are small.
Keep kept_of(const Trace& trace) {
  constexpr std::size_t kSmall = std::size_t{256} << 20;
  std::size_t bytes = 0;
  for (const RankTrace& rank : trace.ranks) bytes += bytes_needed(rank);
  return bytes <= kSmall ? Keep::kEverything : Keep::kWhatDiffers;
}

}  // namespace

Trace replayed(const Trace& trace, const Reference& reference, const JudgePolicy& policy,
               const ReplayedTensor& tensor_of, RunPurpose purpose, Comparer* comparer) {
  Trace result{trace.subject, trace.case_slug, trace.mesh, {}};
  for (const RankTrace& rank : trace.ranks) {
    RecordOptions options;
    options.mesh = trace.mesh;
    options.rank = rank.rank;
    options.reference = &reference;
    options.comparer = comparer;
    options.keep = purpose == RunPurpose::kJudged ? kept_of(trace) : Keep::kWhatDiffers;
    options.arena =
        std::make_shared<Arena>(bytes_needed(rank), fmt::format("replay-{}", rank.rank));
    options.policy = policy;
    options.purpose = purpose;
    RecordWriter writer(options);
    for (const Record& record : rank.records) {
      if (record.compared) {
        writer.begin_step(record.key.step);
        writer.take(record);
        continue;
      }
      const std::optional<HostTensor> tensor = tensor_of(rank, record);
      if (!tensor.has_value()) continue;
      writer.begin_step(record.key.step);
      writer.write({record.key.kind, record.key.name, record.layout, record.grad_scale}, *tensor);
    }
    result.ranks.push_back(writer.finish());
  }
  return result;
}

}  // namespace isoshard
