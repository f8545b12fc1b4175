// SPDX-License-Identifier: Apache-2.0
/// What a training step costs: the unsharded one, and tensor parallelism on shared memory against
/// half of it.
///
///     step_bench [--attach] [SIZES [ROUNDS]] SIZES of S, M, L as "SM" (the default); median, min
///       and max ms over the timed steps of all rounds. With --attach the two ranks of tp are
///       processes of mpirun; one rank is forked as ever.
///
/// A step is forward, loss, backward and AdamW of a Qwen2 with random ids; nothing is recorded,
/// nothing clipped. The peer of the same sizes is train_step_peer.py beside this file (eager
/// PyTorch): run one after the other on an idle machine and compare in that session only. "tp 2" is
/// forward, backward and gradient reduction of two ranks with a thread each, "vocabulary" the same
/// with embedding, head and loss split; the peer is tp_overhead_peer.py (DTensor on gloo; --head
/// splits the head).
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "bench/attach/bench_job.h"
#include "core/base/error.h"
#include "core/mesh/mesh.h"
#include "fixtures/cases/presets.h"
#include "fixtures/inputs/inputs.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/warm_up.h"
#include "subjects/model/config/builtin.h"
#include "subjects/train/parts.h"
#include "suite/record/batches.h"
#include "suite/record/make_subject.h"

namespace {

using namespace isoshard;  // NOLINT: a program of one file

struct Size {
  char name;
  std::int64_t hidden, ffn, layers, heads, kv_heads, vocabulary;
  bool tied;
  std::int64_t batch, sequence;
  int warm, timed;
};
// Those of train_step_peer.py.
constexpr Size kSizes[] = {{'S', 256, 704, 4, 4, 2, 2048, false, 2, 128, 5, 30},
                           {'M', 896, 4864, 2, 14, 2, 8192, false, 2, 256, 2, 7},
                           {'L', 896, 4864, 2, 14, 2, 151936, true, 2, 1024, 1, 2}};

Case case_of(const Size& size, Dtype dtype, int tp) {
  Case item;
  item.subject = tp > 1 ? "autotp" : "reference";
  item.degrees.tp = tp;
  item.dtype = dtype;
  item.config = builtin_config("small");
  item.config.hidden_size = size.hidden;
  item.config.intermediate_size = size.ffn;
  item.config.num_layers = size.layers;
  item.config.num_heads = size.heads;
  item.config.num_kv_heads = size.kv_heads;
  item.config.head_dim = size.hidden / size.heads;
  item.config.vocab_size = size.vocabulary;
  item.config.tie_word_embeddings = size.tied;
  item.config.max_positions = 2048;
  item.attention = AttentionImpl::kSdpa;
  item.batch_size = size.batch;
  item.seq_length = size.sequence;
  item.data.kind = DataSource::Kind::kRandomIds;
  item.settings.optimizer = {.learning_rate = 1e-4, .weight_decay = 0.01};
  item.settings.max_grad_norm = 0;
  return item;
}

using Milliseconds = std::vector<double>;

double ms_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

/// Rank 0's times. With `only_gradients` the step ends after the gradients.
Milliseconds times_of(const Case& item, const Size& size, int threads, bool only_gradients) {
  const CaseData data(item);
  WorldOptions options;
  options.size = item.world_size();
  options.name = item.slug();
  options.deadline = std::chrono::minutes(10);
  const auto body = [&](Rank& rank) {
    at::set_num_threads(threads);
    Mesh mesh(item.mesh(), rank.comm());
    const TrainerConfig config = trainer_config(item, case_weights(item));
    Trainer trainer(item.degrees.tp > 1 ? autotp_parts(config, mesh) : plain_parts(config, mesh, 1),
                    mesh, nullptr);
    trainer.setup();
    const std::vector<TokenBatch> batches = data.rank_batches(0, 0);
    Milliseconds times;
    for (int step = 0; step < size.warm + size.timed; ++step) {
      const auto start = std::chrono::steady_clock::now();
      trainer.forward_backward(batches);
      trainer.reduce_gradients();
      if (!only_gradients) trainer.step();
      if (step >= size.warm) times.push_back(ms_since(start));
    }
    if (rank.rank() == 0) rank.post_result(std::as_bytes(std::span(times)));
  };
  const WorldReport report = default_launcher().launch(std::move(options), body)->wait();
  require_ok(report);
  Milliseconds times(report.ranks[0].result.size() / sizeof(double));
  std::memcpy(times.data(), report.ranks[0].result.data(), report.ranks[0].result.size());
  return times;
}

struct Row {
  std::string name;
  Size size;
  Case item;
  int threads;
  bool only_gradients;
  Milliseconds times = {};
};

void print(Row& row) {
  std::sort(row.times.begin(), row.times.end());
  fmt::print("{:<34} median {:9.1f} ms   min {:9.1f}   max {:9.1f}\n", row.name,
             row.times[row.times.size() / 2], row.times.front(), row.times.back());
}

int run(BenchJob& job, const std::vector<std::string>& arguments) {
  const std::string sizes = !arguments.empty() ? arguments[0] : "SM";
  const int rounds = arguments.size() > 1 ? std::atoi(arguments[1].c_str()) : 2;
  if (rounds < 1 || sizes.find_first_not_of("SML") != std::string::npos)
    throw UsageError("SIZES must be of S, M and L, and ROUNDS at least 1");
  if (sizes.find('S') != std::string::npos) job.require_ranks(2);
  warm_up_kernels();
  std::vector<Row> rows;
  for (const Size& size : kSizes) {
    if (sizes.find(size.name) == std::string::npos) continue;
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      for (const int threads : {1, 2})
        rows.push_back({fmt::format("{} {} sdpa, {} thread{}", size.name, name_of(dtype), threads,
                                    threads > 1 ? "s" : ""),
                        size, case_of(size, dtype, 1), threads, false});
    }
  }
  if (sizes.find('S') != std::string::npos) {
    rows.push_back(
        {"S fp32 gradients, one rank", kSizes[0], case_of(kSizes[0], Dtype::kFloat32, 1), 1, true});
    Case tp2 = case_of(kSizes[0], Dtype::kFloat32, 2);
    rows.push_back({"S fp32 gradients, tp 2", kSizes[0], tp2, 1, true});
    tp2.settings.make_vocab_size_divisible_by = 1;
    rows.push_back({"S fp32 gradients, tp 2, vocabulary", kSizes[0], tp2, 1, true});
  }
  for (int round = 0; round < rounds; ++round) {
    for (Row& row : rows) {
      const Milliseconds times = times_of(row.item, row.size, row.threads, row.only_gradients);
      row.times.insert(row.times.end(), times.begin(), times.end());
    }
  }
  for (Row& row : rows) print(row);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_bench(argc, argv, "usage: step_bench [--attach] [SIZES [ROUNDS]]   e.g. SM 2", run);
}
