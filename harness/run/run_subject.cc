// SPDX-License-Identifier: Apache-2.0
// One forked world per run; the ranks' traces put together.
#include "harness/run/run_subject.h"

#include <fmt/format.h>

#include <utility>

#include "core/base/error.h"
#include "harness/run/world_trace.h"
#include "harness/trace/recorder.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {
namespace {

void check(const SubjectRun& run) {
  if (!run.make || !run.batches)
    throw UsageError(fmt::format("{}: a run needs the functions make and batches", run.name));
  if (run.steps < 1)
    throw UsageError(fmt::format("{}: {} steps are none; give at least 1", run.name, run.steps));
}

Trace record(const SubjectRun& run, const Reference* reference, Keep keep) {
  check(run);
  const int size = run.mesh.world_size();
  const Arenas arenas = keep == Keep::kNothing ? Arenas(static_cast<std::size_t>(size))
                                               : make_arenas(size, run.trace_bytes, "rank");
  WorldOptions options;
  options.size = size;
  options.name = run.name;
  options.deadline = run.deadline;
  const WorldReport report = run_forked(std::move(options), [&](Rank& rank) {
    RecorderOptions recording;
    recording.mesh = run.mesh;
    recording.rank = rank.rank();
    recording.reference = reference;
    recording.policy.coarsest = run.coarsest;
    recording.policy.mask = run.mask_small_gradients;
    recording.purpose = keep == Keep::kNothing ? RunPurpose::kResponse : RunPurpose::kJudged;
    recording.keep = keep;
    recording.arena = arenas[static_cast<std::size_t>(rank.rank())];
    Recorder recorder(std::move(recording));
    rank.set_phase("setup");
    const std::unique_ptr<Subject> subject = run.make(rank, recorder);
    recorder.begin_step(0);
    subject->setup();
    for (int step = 0; step < run.steps; ++step) {
      rank.set_phase(fmt::format("step {}", step));
      if (step > 0) recorder.begin_step(step);
      subject->train_step(run.batches(rank.rank(), step));
    }
    rank.set_phase("handing over the trace");
    rank.post_result(recorder.finish().serialize());
  });
  return trace_of_world({run.name, run.name, run.mesh, {}}, report, arenas);
}

}  // namespace

Reference record_reference(const SubjectRun& plain) {
  return Reference(record(plain, nullptr, Keep::kEverything));
}

void add_response(Reference& reference, const SubjectRun& perturbed) {
  reference.add_response(record(perturbed, &reference, Keep::kNothing));
}

Trace run_subject(const SubjectRun& run, const Reference& reference) {
  return record(run, &reference, Keep::kWhatDiffers);
}

}  // namespace isoshard
