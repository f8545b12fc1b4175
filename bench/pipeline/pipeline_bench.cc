// SPDX-License-Identifier: Apache-2.0
/// What a pipeline costs beyond its schedule, and a timeline of it.
///
///     pipeline_bench [--attach] [SCHEDULE [MICRO_BATCHES [STEPS]]]   1F1B 8 10
///
/// Two ranks of one thread each run forward and backward of a Qwen2 with 4 layers. "ideal" is the
/// time that the schedule takes if each action starts as soon as its rank is free and what it needs
/// is made, bubble included, with the durations that the actions had in the same step: so both
/// numbers are of the same run. The bound is 1.15 for 1F1B with 8 micro-batches. A transfer lasts
/// from the end of the action that makes it to the start of the one that needs it. With --attach
/// the ranks are processes of mpirun, on one host.
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/attach/bench_job.h"
#include "core/base/error.h"
#include "core/mesh/mesh.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/warm_up.h"
#include "subjects/model/config/builtin.h"
#include "subjects/parallel/nd/schedule/pipeline_schedule.h"
#include "subjects/parallel/nd/schedule/schedule_transfers.h"
#include "subjects/parallel/tensor/autotp_plan.h"
#include "subjects/train/parts.h"
#include "suite/record/batches.h"
#include "suite/record/make_subject.h"
#include "suite/testing/watched_stages.h"

namespace {

using namespace isoshard;  // NOLINT: a program of one file
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 2;

/// One action of one step; times in ms of a clock that both ranks share.
struct Timed {
  int rank = 0, step = 0;
  PipelineAction action;
  double begin = 0, end = 0;
};

double now_ms() {
  return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
}

Case case_of(const PipelineSpec& spec) {
  Case item;
  item.subject = "nd";
  item.degrees.pp = spec.pp;
  item.config = builtin_config("small");
  item.config.hidden_size = 256;
  item.config.intermediate_size = 704;
  item.config.num_layers = 4;
  item.config.num_heads = 4;
  item.config.num_kv_heads = 2;
  item.config.head_dim = 64;
  item.config.vocab_size = 512;
  item.config.tie_word_embeddings = false;
  item.attention = AttentionImpl::kSdpa;
  item.batch_size = 2;
  item.micro_batches = spec.micro_batches;
  item.seq_length = 128;
  item.data.kind = DataSource::Kind::kRandomIds;
  item.settings.optimizer = {.learning_rate = 1e-4, .weight_decay = 0.01};
  item.settings.max_grad_norm = 0;
  item.settings.nd.pipeline_schedule = to_string(spec.kind);
  item.settings.nd.stages_per_rank = spec.stages_per_rank;
  item.validate();
  return item;
}

std::vector<Timed> run(const Case& item, const PipelineSpec& spec, int steps) {
  const CaseData data(item);
  WorldOptions options;
  options.size = item.world_size();
  options.name = item.slug();
  options.deadline = std::chrono::minutes(10);
  const auto body = [&](Rank& rank) {
    at::set_num_threads(1);
    Mesh mesh(item.mesh(), rank.comm());
    const TrainerConfig config = trainer_config(item, case_weights(item));
    const auto model = make_model(config.model, config.attention);
    std::vector<Timed> log;
    TrainerParts parts = nd_parts(config, mesh, autotp_plan(*model, 1, 0));
    int step = 0;
    parts.stages = std::make_unique<WatchedStages>(
        std::move(parts.stages), stages_of_rank(spec, rank.rank()),
        [&](const PipelineAction& action, const WatchedStages::Act& act) {
          Timed timed{rank.rank(), step, action, now_ms(), 0};
          at::Tensor result = act();
          timed.end = now_ms();
          log.push_back(timed);
          return result;
        });
    Trainer trainer(std::move(parts), mesh, nullptr);
    trainer.setup();
    const std::vector<TokenBatch> batches = data.rank_batches(0, 0);
    for (; step < steps; ++step) {
      trainer.forward_backward(batches);
      trainer.reduce_gradients();
    }
    rank.post_result(std::as_bytes(std::span(log)));
  };
  const WorldReport report = default_launcher().launch(std::move(options), body)->wait();
  require_ok(report);
  std::vector<Timed> all;
  for (const auto& rank : report.ranks) {
    std::vector<Timed> log(rank.result.size() / sizeof(Timed));
    std::memcpy(log.data(), rank.result.data(), rank.result.size());
    all.insert(all.end(), log.begin(), log.end());
  }
  return all;
}

using Step = std::map<PipelineAction, Timed>;

/// Who makes what an action needs from another rank; the action itself if it needs nothing.
PipelineAction source_of(const PipelineSpec& spec, const PipelineAction& action, const Step& step) {
  const ActionTransfers transfers = transfers_of(spec, action);
  if (!transfers.receives.has_value()) return action;
  const StageTransfer& receive = *transfers.receives;
  PipelineAction source{ActionKind::kForward, receive.peer_stage, receive.micro_batch};
  if (receive.is_gradient) {
    source.kind = ActionKind::kBackward;
    if (!step.contains(source)) source.kind = ActionKind::kBackwardInput;
  }
  return source;
}

double ideal_of(const PipelineSpec& spec, const Step& step) {
  std::vector<std::vector<const Timed*>> rows(kRanks);
  for (const auto& [action, timed] : step)
    rows[static_cast<std::size_t>(timed.rank)].push_back(&timed);
  for (auto& row : rows) std::ranges::sort(row, {}, &Timed::begin);
  std::map<PipelineAction, double> ends;
  std::vector<double> free(kRanks, 0);
  std::vector<std::size_t> next(kRanks, 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      if (next[rank] == rows[rank].size()) continue;
      const Timed& timed = *rows[rank][next[rank]];
      const PipelineAction source = source_of(spec, timed.action, step);
      double begin = free[rank];
      if (source != timed.action) {
        if (!ends.contains(source)) continue;
        begin = std::max(begin, ends.at(source));
      }
      free[rank] = ends[timed.action] = begin + timed.end - timed.begin;
      ++next[rank];
      moved = true;
    }
  }
  return *std::ranges::max_element(free);
}

/// One character for each `ms`: the kind of the action that runs in its middle.
void print_timeline(const PipelineSpec& spec, const Step& step, double begin, double end) {
  const double ms = (end - begin) / 96;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::string line;
    for (int column = 0; column < 96; ++column) {
      const double time = begin + (column + 0.5) * ms;
      char cell = '.';
      for (const auto& [action, timed] : step) {
        if (timed.rank == rank && timed.begin <= time && time < timed.end)
          cell = static_cast<char>(action.kind);
      }
      line += cell;
    }
    fmt::print("  rank {} {}\n", rank, line);
  }
  fmt::print("  (one character is {:.2f} ms; F forward, B backward, I and W its halves)\n", ms);
  int transfers = 0, overlapped = 0;
  for (const auto& [action, timed] : step) {
    const PipelineAction source = source_of(spec, action, step);
    if (source == action) continue;
    ++transfers;
    const Timed& sender = step.at(source);
    overlapped += std::ranges::any_of(step, [&](const auto& other) {
      const Timed& computed = other.second;
      return computed.rank == sender.rank && computed.begin >= sender.end &&
             computed.begin < timed.begin;
    });
  }
  fmt::print("  {} of {} transfers end after their sender has begun its next action\n", overlapped,
             transfers);
}

/// When the step's first action begins and its last one ends, in ms.
std::pair<double, double> span_of(const Step& step) {
  double begin = step.begin()->second.begin, end = 0;
  for (const auto& [action, timed] : step) {
    begin = std::min(begin, timed.begin);
    end = std::max(end, timed.end);
  }
  return {begin, end};
}

int run_benchmark(BenchJob& job, const std::vector<std::string>& arguments) {
  const auto argument = [&](std::size_t i, const char* usual) {
    return i < arguments.size() ? arguments[i] : std::string(usual);
  };
  const std::string schedule = argument(0, "1F1B");
  const int micro_batches = std::atoi(argument(1, "8").c_str());
  const int steps = std::atoi(argument(2, "10").c_str());
  if (micro_batches < 1 || steps < 2)
    throw UsageError("MICRO_BATCHES must be at least 1, and STEPS 2");
  job.require_ranks(kRanks);
  job.require_one_host();
  warm_up_kernels();
  const PipelineKind kind = pipeline_kind_of(schedule);
  const bool one = kind == PipelineKind::kGPipe || kind == PipelineKind::k1F1B;
  const PipelineSpec spec = pipeline_spec(schedule, kRanks, one ? 1 : 2, {}, micro_batches);
  const std::vector<Timed> log = run(case_of(spec), spec, steps);
  std::vector<std::pair<double, int>> ratios;
  std::vector<Step> by_step(static_cast<std::size_t>(steps));
  for (const Timed& timed : log)
    by_step[static_cast<std::size_t>(timed.step)][timed.action] = timed;
  for (int number = 1; number < steps; ++number) {  // the first one warms up
    const Step& step = by_step[static_cast<std::size_t>(number)];
    const auto [begin, end] = span_of(step);
    const double ideal = ideal_of(spec, step);
    fmt::print("step {:>2}: {:8.2f} ms, ideal {:8.2f} ms, ratio {:.3f}\n", number, end - begin,
               ideal, (end - begin) / ideal);
    ratios.emplace_back((end - begin) / ideal, number);
  }
  std::ranges::sort(ratios);
  const auto [median, at] = ratios[ratios.size() / 2];
  fmt::print("{} pp {} x {} stages, {} micro-batches: median ratio {:.3f}\n", schedule, kRanks,
             spec.stages_per_rank, micro_batches, median);
  const Step& step = by_step[static_cast<std::size_t>(at)];
  const auto [begin, end] = span_of(step);
  print_timeline(spec, step, begin, end);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_bench(argc, argv,
                   "usage: pipeline_bench [--attach] [SCHEDULE [MICRO_BATCHES [STEPS]]]   e.g. "
                   "1F1B 8 10",
                   run_benchmark);
}
