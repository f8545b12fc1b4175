// SPDX-License-Identifier: Apache-2.0
// Chains of sinks around a body, and messages in one result: size, then bytes, rank by rank.
#include "harness/run/world_run.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "core/base/error.h"
#include "core/base/mapped_file.h"
#include "harness/world/process_name.h"

namespace isoshard {
namespace {

void append(std::vector<std::byte>& result, const std::vector<std::byte>& message) {
  const auto size = static_cast<std::uint64_t>(message.size());
  const auto* bytes = reinterpret_cast<const std::byte*>(&size);
  result.insert(result.end(), bytes, bytes + sizeof size);
  result.insert(result.end(), message.begin(), message.end());
}

void split(std::span<const std::byte> result, int process,
           std::vector<std::vector<std::byte>>& messages) {
  const auto cut_off = [&](std::uint64_t missing) {
    return InfrastructureError(
        fmt::format("the message of process {} ends {} bytes early", process, missing));
  };
  while (!result.empty()) {
    std::uint64_t size = 0;
    if (result.size() < sizeof size) throw cut_off(sizeof size - result.size());
    std::memcpy(&size, result.data(), sizeof size);
    result = result.subspan(sizeof size);
    if (result.size() < size) throw cut_off(size - result.size());
    const std::span<const std::byte> message = result.first(size);
    messages.emplace_back(message.begin(), message.end());
    result = result.subspan(size);
  }
}

/// What of a spec the chains need, in the process of the ranks.
struct Chains {
  std::function<TapMutation(int rank)> mutation;
  std::vector<std::function<TapObserver(int rank)>> observers;

  [[nodiscard]] SinkChain of_rank(int rank, Sink& end) const {
    std::vector<TapObserver> looking;
    for (const auto& observer : observers) {
      if (TapObserver observing = observer(rank)) looking.push_back(std::move(observing));
    }
    return {mutation ? mutation(rank) : TapMutation(), std::move(looking), end};
  }
};

void run_process(Rank& process, const ProcessWork& work, const Chains& chains) {
  const int first_rank = process.rank() * static_cast<int>(work.ends.size());
  std::vector<SinkChain> own;
  std::vector<Sink*> heads;
  for (std::size_t i = 0; i < work.ends.size(); ++i) {
    own.push_back(chains.of_rank(first_rank + static_cast<int>(i), *work.ends[i]));
    heads.push_back(&own.back().head());
  }
  work.body(process, heads);
  process.set_phase("handing over the records");
  std::vector<std::byte> result;
  for (std::size_t i = 0; i < work.ends.size(); ++i) append(result, work.message(i));
  process.post_result(result);
}

}  // namespace

WorldRun::WorldRun(Launcher& launcher, const RunSpec& spec, Processes processes,
                   std::function<ProcessWork(int process)> make) {
  WorldOptions options;
  options.size = processes == Processes::kOneForAll ? 1 : spec.mesh.world_size();
  options.name = spec.name;
  options.process_name = spec.process_name.empty()
                             ? process_name(spec.subject.empty() ? spec.name : spec.subject, 1)
                             : spec.process_name;
  options.deadline = spec.deadline;
  options.decorate = spec.decorate;
  options.order = spec.order;
  options.transport = spec.transport;
  options.on_each_host = spec.on_each_host;
  world_ = launcher.launch(std::move(options), [chains = Chains{spec.mutation, spec.observers},
                                                make = std::move(make)](Rank& process) {
    run_process(process, make(process.rank()), chains);
  });
}

std::vector<std::vector<std::byte>> WorldRun::wait() {
  const WorldReport report = world_->wait();
  require_unchanged_inputs();  // which explains whatever happened
  require_ok(report);
  std::vector<std::vector<std::byte>> messages;
  for (const RankReport& process : report.ranks) split(process.result, process.rank, messages);
  return messages;
}

}  // namespace isoshard
