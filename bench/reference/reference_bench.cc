// SPDX-License-Identifier: Apache-2.0
/// What the emulated reference costs, against the plain one of the same case in the same run.
///
///     reference_bench [--attach] [ROUNDS] prints median, min and max in ms and the ratio of the
///       medians; rounds are interleaved. With --attach each host of mpirun's processes makes the
///       plain runs, and process 0's the emulated ones.
///
/// "plain": the unsharded run and its three perturbed repetitions, as a verdict needs them. "plain,
/// one run": without repetitions.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench/attach/bench_job.h"
#include "fixtures/cases/presets.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/warm_up.h"
#include "subjects/model/config/builtin.h"
#include "suite/emulation/emulated_reference.h"
#include "suite/record/make_subject.h"
#include "suite/reference/reference.h"

namespace {

using isoshard::Case;
using isoshard::Dtype;

struct Size {
  const char* name;
  std::int64_t hidden, heads, kv_heads, head_dim, ffn, layers, vocabulary, sequence;
};
// The small preset's own size, and one whose matrix products outweigh the recording.
constexpr Size kSizes[] = {{"small", 0, 0, 0, 0, 0, 0, 0, 0},
                           {"medium", 768, 12, 6, 64, 2304, 4, 2048, 128}};

Case case_of(const Size& size, const isoshard::Degrees& degrees, Dtype dtype) {
  Case item;
  item.config = isoshard::builtin_config("small");
  item.settings = isoshard::verify_settings();
  item.subject = degrees.tp > 1 ? "autotp" : "ddp";
  item.degrees = degrees;
  item.dtype = dtype;
  item.data.kind = isoshard::DataSource::Kind::kRandomIds;
  if (size.hidden == 0) return item;
  item.model_name = size.name;
  item.config.hidden_size = size.hidden;
  item.config.num_heads = size.heads;
  item.config.num_kv_heads = size.kv_heads;
  item.config.head_dim = size.head_dim;
  item.config.intermediate_size = size.ffn;
  item.config.num_layers = size.layers;
  item.config.vocab_size = size.vocabulary;
  item.seq_length = size.sequence;
  return item;
}

template <class Run>
double milliseconds(Run run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

double print(const std::string& name, std::vector<double> times) {
  std::ranges::sort(times);
  const double median = times[times.size() / 2];
  fmt::print("  {:<16} median {:8.1f} ms  min {:8.1f}  max {:8.1f}\n", name, median, times.front(),
             times.back());
  return median;
}

void measure(const Case& item, int rounds) {
  std::vector<double> plain, plain_one, emulated;
  for (int round = 0; round < rounds; ++round) {
    plain.push_back(milliseconds([&] { (void)make_reference(item); }));
    plain_one.push_back(milliseconds([&] { (void)make_reference(item, {.responses = 0}); }));
    emulated.push_back(
        milliseconds([&] { (void)make_emulated_reference(item, numerics_of(item)); }));
  }
  fmt::print("{} (dp {} x tp {})\n", item.slug(), item.degrees.dp, item.degrees.tp);
  const double of_plain = print("plain", plain), of_one = print("plain, one run", plain_one),
               of_emulated = print("emulated", emulated);
  fmt::print("  ratio            {:.2f} of plain, {:.2f} of one run\n", of_emulated / of_plain,
             of_emulated / of_one);
}

int run(isoshard::BenchJob&, const std::vector<std::string>& arguments) {
  const int rounds = arguments.empty() ? 5 : std::max(1, std::atoi(arguments.front().c_str()));
  isoshard::warm_up_kernels();
  for (const Size& size : kSizes) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      for (const isoshard::Degrees& degrees :
           {isoshard::Degrees{.dp = 3}, {.tp = 2}, {.dp = 2, .tp = 3}})
        measure(case_of(size, degrees, dtype), rounds);
    }
    Case split = case_of(size, {.dp = 2, .tp = 2}, Dtype::kBFloat16),
         autocast = case_of(size, {.dp = 2, .tp = 2}, Dtype::kFloat32);
    split.settings.make_vocab_size_divisible_by = 1;
    split.settings.label_smoothing = 0.1;
    autocast.settings.autocast = Dtype::kBFloat16;
    measure(split, rounds);
    measure(autocast, rounds);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return isoshard::run_bench(argc, argv, "usage: reference_bench [--attach] [ROUNDS]   e.g. 5",
                             run);
}
