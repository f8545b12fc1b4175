// SPDX-License-Identifier: Apache-2.0
/// Comparing two runs on disk: the reference is put together, and the other run is replayed through recorders.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/error.h"
#include "harness/compare/verdict.h"
#include "harness/trace/assembled.h"
#include "harness/trace/bundle.h"
#include "harness/trace/recorder.h"

namespace isoshard {
namespace {

std::size_t bytes_needed(const RankTrace& rank) {
  std::size_t bytes = 64;
  for (const Record& record : rank.records) bytes += static_cast<std::size_t>(record.bytes) + 64;
  return bytes;
}

Trace replayed(const Trace& trace, const Reference& reference, const JudgeOptions& judging) {
  Trace result{trace.subject, trace.case_slug, trace.mesh, {}};
  for (const RankTrace& rank : trace.ranks) {
    RecorderOptions options;
    options.mesh = trace.mesh;
    options.rank = rank.rank;
    options.reference = &reference;
    options.keep = Keep::kWhatDiffers;
    options.arena = std::make_shared<Arena>(bytes_needed(rank), fmt::format("replay-{}", rank.rank));
    options.k = judging.k;
    options.coarsest = judging.coarsest;
    for (const Record& record : rank.records) options.mask_small_gradients = options.mask_small_gradients || record.unmasked >= 0;
    Recorder recorder(options);
    for (const Record& record : rank.records) {
      recorder.begin_step(record.key.step);
      recorder.on_record({record.key.kind, record.key.name, record.layout, record.grad_scale}, rank.tensor(record));
    }
    result.ranks.push_back(recorder.finish());
  }
  return result;
}

/// The coarsest floating dtype of any record: what floors must allow for when nobody says.
Dtype coarsest_of(const Trace& trace, Dtype coarsest) {
  for (const RankTrace& rank : trace.ranks) {
    for (const Record& record : rank.records) {
      if (unit_roundoff(record.dtype) > unit_roundoff(coarsest)) coarsest = record.dtype;
    }
  }
  return coarsest;
}

}  // namespace

Verdict compare_bundles(const std::filesystem::path& reference_directory, const std::filesystem::path& actual_directory,
                        JudgeOptions options) {
  Bundle trusted = read_bundle(reference_directory);
  const Bundle judged = read_bundle(actual_directory);
  Reference reference(trusted.trace.mesh.world_size() == 1 ? std::move(trusted.trace) : assembled(trusted.trace));
  if (trusted.response_runs > 0) reference.set_responses(std::move(trusted.responses), trusted.response_runs);
  if (trusted.response_runs == 0 && !options.rtol.has_value()) options.level = Level::kExact;
  options.coarsest = coarsest_of(reference.trace(), coarsest_of(judged.trace, options.coarsest));
  return judge(reference, replayed(judged.trace, reference, options), options);
}

}  // namespace isoshard
