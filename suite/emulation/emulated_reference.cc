// SPDX-License-Identifier: Apache-2.0
// The process that emulates all ranks, and what it sends back.
#include "suite/emulation/emulated_reference.h"

#include <ATen/ATen.h>
#include <c10/core/AutogradState.h>
#include <fmt/format.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/mesh/mesh_words.h"
#include "core/tensor/device.h"
#include "fixtures/inputs/inputs.h"
#include "harness/judge/assembled.h"
#include "harness/recorder/recorder.h"
#include "harness/verdict/equal_runs.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/process_name.h"
#include "subjects/checkpoint/checkpoint.h"
#include "suite/emulation/emulated_rank.h"
#include "suite/emulation/emulated_reduction.h"
#include "suite/reference/case_deadline.h"
#include "suite/reference/device/device_rank.h"
#include "suite/reference/next_samples.h"
#include "suite/reference/policy.h"
#include "suite/reference/reference.h"

namespace isoshard {
namespace {

// Each parameter is read once and whole; ranks cut their parts out of it.
std::map<std::string, at::Tensor, std::less<>> read_whole(const std::vector<ParameterSpec>& specs,
                                                          const WeightSource& weights, Dtype dtype,
                                                          at::Device device) {
  std::map<std::string, at::Tensor, std::less<>> whole;
  for (const ParameterSpec& spec : specs) {
    whole[spec.name] =
        weights.read_as(float_type_of(dtype), spec, Shape(spec.shape.size(), 0), spec.shape)
            .to(device);
  }
  return whole;
}

void emulate_all(const Case& c, const CaseData& data, const NumericsSpec& numerics, Rank& process,
                 std::span<Sink* const> sinks) {
  process.set_phase("setup");
  const std::unique_ptr<Model> model = make_model(c.config, c.attention);
  const std::vector<ParameterSpec> specs = model->parameters();
  const DeviceRank settings(c, process.comm());
  const at::Device device =
      c.device == Device::Kind::kCpu ? at::Device(at::kCPU) : device_of_rank(0);
  auto whole = read_whole(specs, *case_weights(c), numerics.precision.dtype, device);
  std::optional<Checkpoint> resumed;
  if (c.resumed.has_value()) resumed = Checkpoint::open(c.resumed->path);
  const EmulatedRun run{
      c, numerics, data, *model, specs, whole, resumed.has_value() ? &*resumed : nullptr, device};
  EmulatedWorld world(numerics.mesh);
  process.set_phase("emulated ranks");
  world.run(numerics.num_threads, [&](int rank) {
    // LibTorch has one thread for the backward passes of a device; ranks that meet in theirs must
    // each have one, their own.
    c10::AutogradState::get_tls_state().set_multithreading_enabled(device.is_cpu());
    EmulatedRank emulated(run, world, rank, *sinks[static_cast<std::size_t>(rank)]);
    emulated.setup();
    for (int step = c.first_step(); step < c.steps; ++step) {
      if (rank == 0) process.set_phase(fmt::format("emulated ranks, step {}", step));
      emulated.train_step(step);
      const int dp_rank = world.coordinate(rank, Axis::kDp);
      record_next_samples(*sinks[static_cast<std::size_t>(rank)],
                          data.rank_batches(step + 1, dp_rank), c.degrees.dp);
    }
  });
  settings.check();
}

RunSpec emulation_spec(const Case& c, const NumericsSpec& numerics,
                       const EmulationOptions& options) {
  c.validate();
  if (numerics.mesh != c.mesh()) {
    throw UsageError(fmt::format("a declared arithmetic for {} cannot emulate {}",
                                 words_of(numerics.mesh.axes()), c.slug()));
  }
  RunSpec spec;
  spec.name = c.slug() + "_emulated";
  spec.subject = "emulated " + c.subject;
  spec.mesh = c.mesh();
  spec.policy = policy_of(c);
  spec.trace_bytes = trace_capacity(c);
  // one core may carry out all ranks, one after the other
  spec.deadline = case_deadline(c, options.deadline) * c.world_size();
  spec.process_name = process_name("emulated", options.number);
  spec.body_of_all = [&c, &numerics, data = std::make_shared<const CaseData>(c)](
                         Rank& process, std::span<Sink* const> sinks) {
    emulate_all(c, *data, numerics, process, sinks);
  };
  return spec;
}

}  // namespace

// References are to the process's own copies, from the fork on.
RunningEmulation::RunningEmulation(const Case& c, const NumericsSpec& numerics,
                                   const EmulationOptions& options)
    : slug_(c.slug()),
      run_(default_launcher(), emulation_spec(c, numerics, options),
           {.reference = options.compare_with, .keep = options.keep}) {}

Trace RunningEmulation::wait() {
  Trace trace = run_.wait();
  trace.case_slug = slug_;
  return trace;
}

Trace emulate(const Case& c, const NumericsSpec& numerics, const EmulationOptions& options) {
  return RunningEmulation(c, numerics, options).wait();
}

void require_equal_copies(const Trace& emulated) {
  const std::optional<UnequalCopies> found = find_unequal_copies(emulated);
  if (!found.has_value()) return;
  throw InfrastructureError(fmt::format(
      "the emulated ranks {} and {} hold different copies of {}: the declared arithmetic is wrong",
      found->first_rank, found->second_rank, describe(found->key)));
}

Reference reference_of_emulated(const Trace& trace) {
  require_equal_copies(trace);
  return Reference(assembled(trace));
}

Reference make_emulated_reference(const Case& c, const NumericsSpec& numerics) {
  return reference_of_emulated(emulate(c, numerics));
}

}  // namespace isoshard
