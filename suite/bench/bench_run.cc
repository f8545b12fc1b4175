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
#include "core/tensor/device.h"
#include "fixtures/inputs/inputs.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/process_name.h"
#include "subjects/registry/subject_spec.h"
#include "subjects/train/trainer.h"
#include "suite/bench/timed_parts.h"
#include "suite/clock/metered_comm.h"
#include "suite/reference/case_deadline.h"
#include "suite/reference/device/device_collectives.h"
#include "suite/reference/device/device_rank.h"

namespace isoshard {
namespace {

constexpr std::int64_t kBytesPerKiB = 1024;

/// In runs with at least so many steps ranks also multiply after each quarter of them. What such a
/// moment takes from caches is then that of few steps.
constexpr int kLongRun = 40;

/// What a rank sends besides its lists, which follow it in this order.
struct RunHead {
  PurposeTimes purposes{};
  bool has_hidden = false;
  double setup_seconds = 0;
  std::int64_t setup_bytes = 0;
  std::uint64_t num_steps = 0, num_spans = 0, num_moments = 0;
};
static_assert(std::is_trivially_copyable_v<RunHead> && std::is_trivially_copyable_v<RankStep>);
static_assert(std::is_trivially_copyable_v<StepSpan>);

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

bool is_moment(const Case& item, int step) {
  return item.steps >= kLongRun && step > 0 && step % (item.steps / 4) == 0;
}

template <class T>
void append(std::vector<std::byte>& bytes, const T* data, std::size_t count) {
  const std::span<const std::byte> more = std::as_bytes(std::span(data, count));
  bytes.insert(bytes.end(), more.begin(), more.end());
}

/// Takes `count` of them off the front.
template <class T>
std::vector<T> taken(std::span<const std::byte>& bytes, std::size_t count) {
  std::vector<T> list(count);
  if (count > 0) std::memcpy(list.data(), bytes.data(), count * sizeof(T));
  bytes = bytes.subspan(count * sizeof(T));
  return list;
}

/// What a rank measures with.
struct Meter {
  StepClock clock;
  bool has_hidden = false;  ///< whether its communicator knows what is on its way
};

void train(const Case& item, const CaseData& data, const BenchRunOptions& options, Meter& meter,
           Rank& rank) {
  StepClock& clock = meter.clock;
  at::set_num_threads(options.threads);
  const bool is_on_device = item.device != Device::Kind::kCpu;
  const c10::Device device =
      is_on_device ? device_of_rank(rank.rank()) : c10::Device(c10::DeviceType::CPU);
  if (is_on_device) clock.set_wait([device] { synchronize(device); });
  count_tensor_memory(device);
  rank.set_phase("setup");
  const auto start = std::chrono::steady_clock::now();
  DeviceRank of_device(item, rank.comm());
  // Above what is staged, so that copies between device and host are communication.
  const std::unique_ptr<Communicator> of_clock =
      is_on_device ? metered(of_device.comm(), clock, [] { return false; }) : nullptr;
  Mesh mesh(is_reference(item.subject) ? mesh_of({}) : item.mesh(),
            is_on_device ? *of_clock : rank.comm());
  TrainerParts parts =
      subject_spec(item.subject)
          .make_parts(trainer_config(item, case_weights(item), mesh.rank()), mesh, {});
  time_parts(parts, clock);
  Trainer trainer(std::move(parts), mesh, nullptr);
  trainer.setup();
  RunHead head;
  head.setup_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  head.setup_bytes = tensor_bytes().allocated;
  std::vector<RankStep> steps;
  std::vector<ProductRates> moments;
  const auto multiply = [&] {
    if (!options.times_products) return;
    rank.set_phase("products of matrices");
    mesh.world().barrier({Purpose::kSetup, Axis::kWorld, {}});
    moments.push_back(time_products(item.settings.autocast.value_or(item.dtype), device));
  };
  multiply();
  for (int step = 0; step < item.steps; ++step) {
    if (is_moment(item, step)) multiply();
    rank.set_phase(fmt::format("step {}", step));
    if (step == options.warmup_steps) clock.clear_purposes();
    steps.push_back(timed_step(trainer, item, data, mesh, clock, step));
    if (options.on_step && rank.rank() == 0) options.on_step(step);
  }
  multiply();
  of_device.check();
  head.purposes = clock.purposes();
  head.has_hidden = meter.has_hidden;
  head.num_steps = steps.size();
  head.num_spans = clock.spans().size();
  head.num_moments = moments.size();
  std::vector<std::byte> bytes;
  append(bytes, &head, 1);
  append(bytes, steps.data(), steps.size());
  append(bytes, clock.spans().data(), clock.spans().size());
  append(bytes, moments.data(), moments.size());
  rank.post_result(bytes);
}

RankRun received(const RankReport& report) {
  RunHead head;
  if (report.result.size() < sizeof(head))
    throw InfrastructureError(fmt::format("rank {} reported no times", report.rank));
  std::memcpy(&head, report.result.data(), sizeof(head));
  RankRun run;
  run.purposes = head.purposes;
  run.has_hidden = head.has_hidden;
  run.setup_seconds = head.setup_seconds;
  run.setup_bytes = head.setup_bytes;
  run.peak_resident_bytes = std::int64_t{report.peak_rss_kib} * kBytesPerKiB;
  std::span<const std::byte> rest = std::span(report.result).subspan(sizeof(head));
  if (rest.size() != head.num_steps * sizeof(RankStep) + head.num_spans * sizeof(StepSpan) +
                         head.num_moments * sizeof(ProductRates))
    throw InfrastructureError(fmt::format("the times of rank {} are cut off", report.rank));
  run.steps = taken<RankStep>(rest, head.num_steps);
  run.spans = taken<StepSpan>(rest, head.num_spans);
  run.products = taken<ProductRates>(rest, head.num_moments);
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
  // each rank is a process of its own, and gets its copy when it is forked
  const auto meter = std::make_shared<Meter>();
  WorldOptions world;
  world.size = is_reference(item.subject) ? 1 : item.world_size();
  world.name = item.slug();
  world.process_name = process_name(item.subject, 1);
  world.deadline = case_deadline(item);
  world.order = item.reduction_order;
  if (item.device == Device::Kind::kCpu) {
    world.decorate = [meter](std::unique_ptr<Communicator> inner, int) {
      meter->has_hidden = knows_what_is_under_way(*inner);
      return metered(std::move(inner), meter->clock);
    };
  } else {
    world.transport = device_collectives(item).transport;
  }
  Launcher& launcher = default_launcher();
  const WorldReport report =
      launcher
          .launch(std::move(world), [&](Rank& rank) { train(item, data, options, *meter, rank); })
          ->wait();
  require_ok(report);
  BenchRun run;
  // where processes of several hosts measure, each has its own clock
  if (Peers* const peers = launcher.peers(); peers != nullptr)
    run.has_one_clock = peers->hosts().count() == 1;
  run.warmup_steps = options.warmup_steps;
  run.threads = options.threads;
  for (const RankReport& rank : report.ranks) run.ranks.push_back(received(rank));
  std::vector<std::span<const ProductRates>> moments;
  for (const RankRun& rank : run.ranks) moments.emplace_back(rank.products);
  run.has_hidden = std::ranges::all_of(run.ranks, &RankRun::has_hidden);
  run.ceiling = ceiling_of(moments, options.threads * static_cast<int>(run.ranks.size()));
  if (item.device != Device::Kind::kCpu) run.ceiling.size *= kDeviceProductFactor;
  return run;
}

}  // namespace isoshard
