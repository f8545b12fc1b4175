// SPDX-License-Identifier: Apache-2.0
// The body of a rank, and how its numbers reach the controller.
#include "suite/bench/bench_run.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>

#include "core/base/error.h"
#include "core/mesh/mesh.h"
#include "fixtures/inputs/inputs.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/process_name.h"
#include "subjects/registry/subject_spec.h"
#include "subjects/train/trainer.h"
#include "suite/bench/metered_comm.h"
#include "suite/bench/timed_parts.h"
#include "suite/reference/case_deadline.h"

namespace isoshard {
namespace {

constexpr std::int64_t kBytesPerKiB = 1024;

/// What a rank sends besides its steps, which follow it.
struct RunHead {
  std::array<PurposeTotals, kNumPurposes> purposes{};
  double setup_seconds = 0;
  std::int64_t setup_bytes = 0;
  std::uint64_t num_steps = 0;
};
static_assert(std::is_trivially_copyable_v<RunHead> && std::is_trivially_copyable_v<RankStep>);

std::vector<TokenBatch> batches_of_rank(const Case& item, const CaseData& data, const Mesh& mesh,
                                        int step) {
  return is_reference(item.subject) ? data.global_batches(step)
                                    : data.rank_batches(step, mesh.coordinate(Axis::kDp));
}

RankStep timed_step(Trainer& trainer, const Case& item, const CaseData& data, const Mesh& mesh,
                    StepClock& clock, int step) {
  RankStep result;
  mesh.world().barrier({Purpose::kSetup, Axis::kWorld, {}});
  reset_peak_tensor_bytes();
  clock.begin_step();
  trainer.forward_backward(batches_of_rank(item, data, mesh, step));
  clock.enter(StepPart::kBackward);
  trainer.reduce_gradients();
  clock.enter(StepPart::kOptimizer);
  trainer.clip();
  trainer.step();
  result.times = clock.end_step();
  result.loss = trainer.loss();
  result.grad_norm = trainer.grad_norm();
  result.memory = tensor_bytes();
  return result;
}

void post(Rank& rank, const RunHead& head, const std::vector<RankStep>& steps) {
  std::vector<std::byte> bytes(sizeof(head) + steps.size() * sizeof(RankStep));
  std::memcpy(bytes.data(), &head, sizeof(head));
  if (!steps.empty())
    std::memcpy(bytes.data() + sizeof(head), steps.data(), steps.size() * sizeof(RankStep));
  rank.post_result(bytes);
}

void train(const Case& item, const CaseData& data, const BenchRunOptions& options, StepClock& clock,
           Rank& rank) {
  at::set_num_threads(options.threads);
  count_tensor_memory();
  rank.set_phase("setup");
  const auto start = std::chrono::steady_clock::now();
  Mesh mesh(is_reference(item.subject) ? mesh_of({}) : item.mesh(), rank.comm());
  TrainerParts parts =
      subject_spec(item.subject).make_parts(trainer_config(item, case_weights(item)), mesh, {});
  time_parts(parts, clock);
  Trainer trainer(std::move(parts), mesh, nullptr);
  trainer.setup();
  RunHead head;
  head.setup_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  head.setup_bytes = tensor_bytes().allocated;
  std::vector<RankStep> steps;
  for (int step = 0; step < item.steps; ++step) {
    rank.set_phase(fmt::format("step {}", step));
    if (step == options.warmup_steps) clock.clear_purposes();
    steps.push_back(timed_step(trainer, item, data, mesh, clock, step));
    if (options.on_step && rank.rank() == 0) options.on_step(step);
  }
  head.purposes = clock.purposes();
  head.num_steps = steps.size();
  post(rank, head, steps);
}

RankRun received(const RankReport& report) {
  RunHead head;
  if (report.result.size() < sizeof(head))
    throw InfrastructureError(fmt::format("rank {} reported no times", report.rank));
  std::memcpy(&head, report.result.data(), sizeof(head));
  RankRun run;
  run.purposes = head.purposes;
  run.setup_seconds = head.setup_seconds;
  run.setup_bytes = head.setup_bytes;
  run.peak_resident_bytes = std::int64_t{report.peak_rss_kib} * kBytesPerKiB;
  run.steps.resize(head.num_steps);
  if (report.result.size() != sizeof(head) + run.steps.size() * sizeof(RankStep))
    throw InfrastructureError(fmt::format("the times of rank {} are cut off", report.rank));
  if (!run.steps.empty())
    std::memcpy(run.steps.data(), report.result.data() + sizeof(head),
                run.steps.size() * sizeof(RankStep));
  return run;
}

}  // namespace

std::size_t BenchRun::slowest(std::size_t step) const {
  std::size_t slowest = 0;
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    if (ranks[r].steps[step].times.total > ranks[slowest].steps[step].times.total) slowest = r;
  }
  return slowest;
}

std::vector<double> BenchRun::step_seconds() const {
  std::vector<double> seconds;
  for (std::size_t i = static_cast<std::size_t>(warmup_steps); i < num_steps(); ++i)
    seconds.push_back(ranks[slowest(i)].steps[i].times.total);
  return seconds;
}

BenchRun run_bench(const Case& item, const BenchRunOptions& options) {
  const CaseData data(item);
  // each rank gets its copy when it is forked
  const auto clock = std::make_shared<StepClock>();
  WorldOptions world;
  world.size = is_reference(item.subject) ? 1 : item.world_size();
  world.name = item.slug();
  world.process_name = process_name(item.subject, 1);
  world.deadline = case_deadline(item);
  world.order = item.reduction_order;
  world.decorate = [clock](std::unique_ptr<Communicator> inner, int) {
    return metered(std::move(inner), *clock);
  };
  const WorldReport report =
      run_forked(std::move(world), [&](Rank& rank) { train(item, data, options, *clock, rank); });
  require_ok(report);
  BenchRun run;
  run.warmup_steps = options.warmup_steps;
  run.threads = options.threads;
  for (const RankReport& rank : report.ranks) run.ranks.push_back(received(rank));
  return run;
}

}  // namespace isoshard
