// SPDX-License-Identifier: Apache-2.0
// Recorders at the ends of the chains, and the ranks' traces put together.
#include "harness/run/record.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

void train(const RunSpec& spec, Rank& rank, Sink& sink) {
  rank.set_phase("setup");
  const std::unique_ptr<Subject> subject = spec.make(rank, sink);
  sink.begin_step(0);
  subject->setup();
  for (int step = 0; step < spec.steps; ++step) {
    rank.set_phase(fmt::format("step {}", step));
    if (step > 0) sink.begin_step(step);
    subject->train_step(spec.batches(rank.rank(), step));
  }
}

RunSpec checked(RunSpec spec) {
  if (spec.on_each_host && (spec.body_of_all || spec.mesh.world_size() != 1)) {
    throw UsageError(fmt::format("{}: a run on each host must have one rank, got {}", spec.name,
                                 spec.mesh.world_size()));
  }
  if (spec.body || spec.body_of_all) return spec;
  if (!spec.make || !spec.batches)
    throw UsageError(fmt::format("{}: a run needs the functions make and batches", spec.name));
  if (spec.steps < 1)
    throw UsageError(
        fmt::format("{}: the number of steps must be at least 1, got {}", spec.name, spec.steps));
  return spec;
}

Processes processes_of(const RunSpec& spec) {
  return spec.body_of_all ? Processes::kOneForAll : Processes::kOneARank;
}

std::unique_ptr<TraceStore> store_of(Launcher& launcher, const RunSpec& spec, Keep keep) {
  if (keep == Keep::kNothing) return no_trace_store();
  const Sharing sharing = spec.on_each_host  ? Sharing::kOnEachHost
                          : spec.body_of_all ? Sharing::kTogether
                                             : Sharing::kOwn;
  return make_trace_store(launcher, spec.mesh.world_size(), spec.trace_bytes, sharing);
}

ProcessWork work_of(const RunSpec& spec, const Recording& recording, TraceStore& store,
                    int process) {
  // Recorders of one process share an arena: of copies, one is kept and compared.
  const auto replica_bytes = spec.body_of_all ? std::make_shared<ReplicaBytes>() : nullptr;
  std::vector<std::shared_ptr<Recorder>> recorders;
  const int num_ranks = spec.body_of_all ? spec.mesh.world_size() : 1;
  for (int i = 0; i < num_ranks; ++i) {
    RecordOptions options;
    options.mesh = spec.mesh;
    options.rank = process * num_ranks + i;
    options.reference = recording.reference;
    options.keep = recording.keep;
    options.arena = store.of_rank(options.rank);
    options.replica_bytes = replica_bytes;
    options.policy = spec.policy;
    options.purpose = recording.purpose;
    recorders.push_back(std::make_shared<Recorder>(std::move(options)));
  }
  ProcessWork work;
  work.ends.assign(recorders.begin(), recorders.end());
  work.body = [&spec](Rank& rank, std::span<Sink* const> heads) {
    if (spec.body_of_all) return spec.body_of_all(rank, heads);
    if (spec.body) return spec.body(rank, *heads.front());
    train(spec, rank, *heads.front());
  };
  work.message = [recorders](std::size_t i) { return recorders[i]->finish().serialize(); };
  return work;
}

}  // namespace

RunningRecord::RunningRecord(Launcher& launcher, RunSpec spec, const Recording& recording)
    : trace_{spec.subject.empty() ? spec.name : spec.subject, spec.name, spec.mesh, {}},
      store_(store_of(launcher, checked(spec), recording.keep)),
      run_(launcher, spec, processes_of(spec),
           [spec = std::make_shared<const RunSpec>(spec), recording, store = store_.get()](
               int process) { return work_of(*spec, recording, *store, process); }) {}

Trace RunningRecord::wait() {
  for (const std::vector<std::byte>& message : run_.wait())
    trace_.ranks.push_back(RankTrace::deserialize(message));
  const auto size = static_cast<std::size_t>(trace_.mesh.world_size());
  if (trace_.ranks.size() != size)
    throw InfrastructureError(fmt::format("{} of {} traces were sent", trace_.ranks.size(), size));
  for (std::size_t r = 0; r < size; ++r)
    trace_.ranks[r].arena = store_->kept_by(static_cast<int>(r));
  return std::move(trace_);
}

Trace record(Launcher& launcher, const RunSpec& spec, const Recording& recording) {
  return RunningRecord(launcher, spec, recording).wait();
}

}  // namespace isoshard
