// SPDX-License-Identifier: Apache-2.0
// Forks a case's world, records on every rank, and puts the rank traces together.
#include "suite/record/run_case.h"

#include <fmt/format.h>

#include <memory>
#include <utility>
#include <vector>

#include "fixtures/inputs/inputs.h"
#include "harness/run/world_trace.h"
#include "suite/record/batches.h"
#include "suite/record/registry.h"
#include "suite/reference/lattice_guard.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

constexpr double kResponsesAllowed = 3;

RecorderOptions recorder_options(const Case& item, const Reference& reference,
                                 const RunOptions& options, int rank,
                                 std::shared_ptr<Arena> arena) {
  RecorderOptions recording;
  recording.mesh = item.mesh();
  recording.rank = rank;
  if (options.compare) recording.reference = &reference;
  recording.keep = options.keep;
  recording.arena = std::move(arena);
  if (options.mutation) recording.mutation = options.mutation(rank);
  // Against a reference without responses everything must be equal: nothing is masked.
  recording.mask_small_gradients =
      options.compare && item.settings.optimizer.kind == OptimizerSettings::Kind::kAdamW &&
      reference.response_runs() > 0;
  recording.k = kResponsesAllowed;
  recording.coarsest = item.coarsest_dtype();
  return recording;
}

}  // namespace

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
      subject->save(options.checkpoints->path());
      subject =
          make_subject(resumed_case(item, options.checkpoints->path()), rank, &sink, options.edits);
      subject->setup();
    }
    run_step(*subject, item, data, options, rank, step);
    subject->state();
    save_after(step + 1, item, *subject, rank);
    if (after_step && !after_step(step)) return;
  }
}

Trace run_case(const Case& item, const Reference& reference, const RunOptions& options) {
  require_subject(item.subject);
  item.validate();
  require_usable_checkpoint(item);
  RunOptions running = options;
  if (item.reload_after != 0) running.checkpoints = std::make_shared<ScratchFolder>();
  const CaseData data(item);
  const Arenas arenas = options.keep == Keep::kNothing
                            ? Arenas(static_cast<std::size_t>(item.world_size()))
                            : make_arenas(item.world_size(), trace_capacity(item), "rank");
  WorldOptions world;
  world.size = item.world_size();
  world.name = item.slug();
  world.deadline = options.deadline;
  world.decorate = options.decorate;
  world.order = options.order.value_or(item.reduction_order);
  const WorldReport report = run_forked(std::move(world), [&](Rank& rank) {
    const int r = rank.rank();
    Recorder recorder(
        recorder_options(item, reference, options, r, arenas[static_cast<std::size_t>(r)]));
    run_steps(item, options.sampler ? data.with_sampler(options.sampler, r) : data, running,
              recorder, rank);
    rank.set_phase("handing over the trace");
    rank.post_result(recorder.finish().serialize());
  });
  return trace_of_world({item.subject, item.slug(), item.mesh(), {}}, report, arenas);
}

JudgeOptions judge_options(const Case& item) {
  JudgeOptions options;
  options.k = kResponsesAllowed;
  if (is_lattice(item)) options.level = Level::kExact;
  options.activation_grad_scale = item.subject == "reference" ? 1 : item.degrees.dp;
  options.coarsest = item.coarsest_dtype();
  options.max_grad_norm = item.settings.max_grad_norm;
  for (const ParameterSpec& spec : make_model(item.config, item.attention)->parameters()) {
    // the embedding's and the head's
    if (spec.param_class == ParamClass::kTied) options.num_names[spec.name] = 2;
  }
  return options;
}

JudgeOptions exact_options(const Case& item) {
  JudgeOptions options = judge_options(item);
  options.level = Level::kExact;
  return options;
}

}  // namespace isoshard
