// SPDX-License-Identifier: Apache-2.0
// The process that emulates all ranks, and what it sends back.
#include "suite/emulation/emulated_reference.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "fixtures/inputs/inputs.h"
#include "harness/recorder/recorder.h"
#include "harness/trace/assembled.h"
#include "harness/verdict/equal_runs.h"
#include "subjects/checkpoint/checkpoint.h"
#include "suite/emulation/emulated_rank.h"
#include "suite/emulation/emulated_reduction.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

RecorderOptions recording_of(const Case& c, const Arithmetic& arithmetic,
                             const EmulationOptions& options, const Arenas& arenas,
                             const std::shared_ptr<ReplicaBytes>& replica_bytes, int rank) {
  RecorderOptions recording;
  recording.mesh = c.mesh();
  recording.rank = rank;
  recording.reference = options.compare_with;
  recording.keep = options.keep;
  recording.arena = arenas[static_cast<std::size_t>(rank)];
  recording.replica_bytes = replica_bytes;
  recording.coarsest =
      arithmetic.products.has_value() ? arithmetic.products->dtype : arithmetic.dtype;
  recording.mask_small_gradients = options.compare_with != nullptr &&
                                   c.settings.optimizer.kind == OptimizerSettings::Kind::kAdamW;
  return recording;
}

// Each parameter is read once and whole; ranks cut their parts out of it.
std::map<std::string, at::Tensor, std::less<>> read_whole(const std::vector<ParameterSpec>& specs,
                                                          const WeightSource& weights,
                                                          Dtype dtype) {
  std::map<std::string, at::Tensor, std::less<>> whole;
  for (const ParameterSpec& spec : specs) {
    whole[spec.name] =
        weights.read_as(float_type_of(dtype), spec, Shape(spec.shape.size(), 0), spec.shape);
  }
  return whole;
}

// The traces of all ranks, one after the other: size, then bytes.
void append(std::vector<std::byte>& message, const std::vector<std::byte>& trace) {
  const auto size = static_cast<std::uint64_t>(trace.size());
  const auto* bytes = reinterpret_cast<const std::byte*>(&size);
  message.insert(message.end(), bytes, bytes + sizeof size);
  message.insert(message.end(), trace.begin(), trace.end());
}

std::vector<RankTrace> traces_in(std::span<const std::byte> message) {
  std::vector<RankTrace> traces;
  while (!message.empty()) {
    std::uint64_t size = 0;
    if (message.size() < sizeof size)
      throw InfrastructureError("the emulator's message ends within a size");
    std::memcpy(&size, message.data(), sizeof size);
    message = message.subspan(sizeof size);
    if (message.size() < size)
      throw InfrastructureError(
          fmt::format("the emulator's message ends {} bytes early", size - message.size()));
    traces.push_back(RankTrace::deserialize(message.first(size)));
    message = message.subspan(size);
  }
  return traces;
}

void emulate_all(const Case& c, const CaseData& data, const Arithmetic& arithmetic,
                 const EmulationOptions& options, const Arenas& arenas, Rank& process) {
  process.set_phase("setup");
  const std::unique_ptr<Model> model = make_model(c.config, c.attention);
  const std::vector<ParameterSpec> specs = model->parameters();
  auto whole = read_whole(specs, *case_weights(c), arithmetic.dtype);
  std::optional<Checkpoint> resumed;
  if (c.resumed.has_value()) resumed = Checkpoint::open(c.resumed->path);
  const EmulatedRun run{
      c, arithmetic, data, *model, specs, whole, resumed.has_value() ? &*resumed : nullptr};
  EmulatedWorld world(arithmetic.dp, arithmetic.tp);
  const auto replica_bytes = std::make_shared<ReplicaBytes>();
  std::vector<std::unique_ptr<Recorder>> recorders;
  for (int rank = 0; rank < c.world_size(); ++rank) {
    recorders.push_back(std::make_unique<Recorder>(
        recording_of(c, arithmetic, options, arenas, replica_bytes, rank)));
  }
  process.set_phase("emulated ranks");
  world.run(arithmetic.num_threads, [&](int rank) {
    EmulatedRank emulated(run, world, rank, *recorders[static_cast<std::size_t>(rank)]);
    emulated.setup();
    for (int step = c.first_step(); step < c.steps; ++step) emulated.train_step(step);
  });
  process.set_phase("handing over the traces");
  std::vector<std::byte> message;
  for (const auto& recorder : recorders) append(message, recorder->finish().serialize());
  process.post_result(message);
}

// One for all ranks, whose copies are kept once.
Arenas shared_arena(const Case& c, const Arithmetic& arithmetic) {
  c.validate();
  if (arithmetic.dp != c.degrees.dp || arithmetic.tp != c.degrees.tp) {
    throw UsageError(fmt::format("a record for dp {} x tp {} cannot emulate {}", arithmetic.dp,
                                 arithmetic.tp, c.slug()));
  }
  const auto num_ranks = static_cast<std::size_t>(c.world_size());
  return Arenas(num_ranks, std::make_shared<Arena>(trace_capacity(c) * num_ranks, "emulated"));
}

ForkedWorld emulating_world(const Case& c, const Arithmetic& arithmetic,
                            const EmulationOptions& options, const Arenas& arenas) {
  const CaseData data(c);
  WorldOptions world;
  world.name = c.slug() + "_emulated";
  world.deadline = options.deadline;
  // References are to the process's own copies, from the fork on.
  return ForkedWorld(std::move(world), [&](Rank& process) {
    emulate_all(c, data, arithmetic, options, arenas, process);
  });
}

}  // namespace

RunningEmulation::RunningEmulation(const Case& c, const Arithmetic& arithmetic,
                                   const EmulationOptions& options)
    : trace_{"emulated " + c.subject, c.slug(), c.mesh(), {}},
      arenas_(shared_arena(c, arithmetic)),
      world_(emulating_world(c, arithmetic, options, arenas_)) {}

Trace RunningEmulation::wait() {
  const WorldReport report = world_.wait();
  require_ok(report);
  trace_.ranks = traces_in(report.ranks.at(0).result);
  hand_over(arenas_, trace_);
  return std::move(trace_);
}

Trace emulate(const Case& c, const Arithmetic& arithmetic, const EmulationOptions& options) {
  return RunningEmulation(c, arithmetic, options).wait();
}

void require_equal_copies(const Trace& emulated) {
  const std::optional<UnequalCopies> found = find_unequal_copies(emulated);
  if (!found.has_value()) return;
  throw InfrastructureError(fmt::format(
      "the emulated ranks {} and {} hold different copies of {}: the arithmetic record is wrong",
      found->first_rank, found->second_rank, describe(found->key)));
}

Reference reference_of_emulated(const Trace& trace) {
  require_equal_copies(trace);
  return Reference(assembled(trace));
}

Reference make_emulated_reference(const Case& c, const Arithmetic& arithmetic) {
  return reference_of_emulated(emulate(c, arithmetic));
}

}  // namespace isoshard
