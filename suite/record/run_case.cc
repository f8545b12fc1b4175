// SPDX-License-Identifier: Apache-2.0
// What a rank of a case does, and the spec of its world.
#include "suite/record/run_case.h"

#include <fmt/format.h>

#include <memory>
#include <utility>

#include "fixtures/inputs/inputs.h"
#include "harness/world/process_name.h"
#include "subjects/checkpoint/checkpoint_io.h"
#include "subjects/registry/subject_spec.h"
#include "suite/clock/collective_times.h"
#include "suite/record/batches.h"
#include "suite/record/expected_calls.h"
#include "suite/record/make_subject.h"
#include "suite/reference/case_deadline.h"
#include "suite/reference/device/device_collectives.h"
#include "suite/reference/lattice_guard.h"
#include "suite/reference/next_samples.h"
#include "suite/reference/reference.h"

namespace isoshard {

RunOptions digests_only(RunOptions options) {
  options.keep = Keep::kNothing;
  options.compare = false;
  return options;
}

void run_step(Subject& subject, const Case& item, const CaseData& data, const RunOptions& options,
              Rank& rank, int step) {
  rank.set_phase(fmt::format("step {}: forward and backward", step));
  std::vector<Batch> micro_batches = batches_of(item, data, rank.rank(), step);
  if (options.batches) options.batches(micro_batches, data, rank.rank(), step);
  subject.forward_backward(micro_batches);
  rank.set_phase(fmt::format("step {}: gradient reduction", step));
  subject.reduce_gradients();
  rank.set_phase(fmt::format("step {}: clipping", step));
  subject.clip();
  rank.set_phase(fmt::format("step {}: optimizer", step));
  subject.step();
}

namespace {
void save_after(int steps_done, const Case& item, Subject& subject, Rank& rank) {
  if (item.save_path.empty() || item.save_after != steps_done) return;
  rank.set_phase(fmt::format("checkpoint after {} steps", steps_done));
  subject.save(item.save_path);
}
}  // namespace

void run_steps(const Case& item, const CaseData& data, const RunOptions& options, Sink& sink,
               Rank& rank, const std::function<bool(int step)>& after_step) {
  rank.set_phase("setup");
  std::unique_ptr<Subject> subject = make_subject(item, rank, &sink, options.edits);
  subject->setup();
  save_after(item.first_step(), item, *subject, rank);
  for (int step = item.first_step(); step < item.steps; ++step) {
    if (item.reload_after != 0 && item.reload_after == step) {
      rank.set_phase(fmt::format("reload after {} steps", step));
      try {
        subject->save(options.checkpoints->path());
      } catch (const UnsavableState&) {
        return;  // on every rank; what was recorded until here shows why
      }
      subject.reset();  // one at a time in a process holds its settings
      subject =
          make_subject(resumed_case(item, options.checkpoints->path()), rank, &sink, options.edits);
      subject->setup();
    }
    CollectiveLog* const calls = options.calls == nullptr
                                     ? nullptr
                                     : &options.calls->at(static_cast<std::size_t>(rank.rank()));
    if (calls != nullptr) calls->clear();
    if (options.times != nullptr) options.times->begin_step(rank.rank());
    run_step(*subject, item, data, options, rank, step);
    if (options.times != nullptr) options.times->end_step(rank.rank());
    if (calls != nullptr) calls->record(sink, item.mesh(), rank.rank());
    subject->state();
    if (!is_reference(item.subject))
      record_next_samples(
          sink, data.rank_batches(step + 1, item.mesh().coordinate(rank.rank(), Axis::kDp)),
          item.degrees.dp);
    save_after(step + 1, item, *subject, rank);
    if (after_step && !after_step(step)) return;
  }
}

RunSpec run_spec_of(const Case& item, const RunOptions& options) {
  RunSpec spec;
  spec.name = item.slug();
  spec.subject = item.subject;
  spec.mesh = item.mesh();
  spec.policy = policy_of(item);
  spec.transport = device_collectives(item).transport;
  spec.order = options.order.value_or(item.reduction_order);
  spec.decorate = options.decorate;
  spec.mutation = options.mutation;
  spec.observers = options.observers;
  spec.trace_bytes = trace_capacity(item);
  spec.deadline = case_deadline(item, options.deadline);
  spec.process_name = process_name(item.subject, options.number);
  return spec;
}

Trace run_case(const Case& item, const Reference& reference, const RunOptions& options) {
  (void)subject_spec(item.subject);
  item.validate();
  require_usable_checkpoint(item);
  RunOptions running = options;
  if (item.reload_after != 0) running.checkpoints = std::make_shared<ScratchFolder>();
  running.calls =
      std::make_shared<std::vector<CollectiveLog>>(static_cast<std::size_t>(item.world_size()));
  const CaseData data(item);
  RunSpec spec = run_spec_of(item, options);
  spec.decorate = logged(options.decorate, running.calls);
  if (options.times != nullptr) spec.decorate = options.times->metering(std::move(spec.decorate));
  spec.policy = with_collectives(std::move(spec.policy), item);
  spec.body = [&](Rank& rank, Sink& sink) {
    run_steps(item, options.sampler ? data.with_sampler(options.sampler, rank.rank()) : data,
              running, sink, rank);
  };
  return record(default_launcher(), spec,
                {.reference = options.compare ? &reference : nullptr, .keep = options.keep});
}

}  // namespace isoshard
