// SPDX-License-Identifier: Apache-2.0
// Cuts are drawn by hashes: nothing else of a run differs from the reference's.
#include "suite/reference/redrawn_run.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "fixtures/inputs/inputs.h"
#include "harness/run/record.h"
#include "harness/run/side_by_side.h"
#include "harness/stats/stats.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/process_name.h"
#include "subjects/model/model.h"
#include "suite/reference/case_deadline.h"
#include "suite/reference/lattice_guard.h"
#include "suite/reference/plain_run.h"

namespace isoshard {
namespace {

constexpr std::int64_t kMostPieces = 3;

std::uint64_t drawn(std::uint64_t seed, std::string_view name, std::uint64_t number) {
  std::uint64_t hash =
      digest_of(reinterpret_cast<const std::byte*>(name.data()), name.size(), seed);
  return digest_of(reinterpret_cast<const std::byte*>(&number), sizeof(number), hash);
}

// The pieces' numbers in the order in which they are added.
std::vector<std::size_t> random_order(std::uint64_t seed, std::string_view name,
                                      std::size_t pieces) {
  std::vector<std::size_t> order(pieces);
  for (std::size_t i = 0; i < pieces; ++i) order[i] = i;
  for (std::size_t i = pieces; i > 1; --i)
    std::swap(order[i - 1], order[drawn(seed, name, 1000 + i) % i]);
  return order;
}

PlainRun redrawn_run(const Case& c, const CaseData& data,
                     std::shared_ptr<const WeightSource> weights, int number) {
  PlainRun run;
  if (c.degrees.dp > 1 && number % 4 == 3) {
    run = regrouped_run(c, data, std::move(weights));
  } else if (number % 4 == 1 && factor_shows(c)) {
    run = scaled_run(c, data, std::move(weights));
  } else {
    run = whole_batch_run(data, std::move(weights));
  }
  // Seed 0 is left to those who want the first draw of a test of their own.
  const auto strategy = std::make_shared<const RedrawnStrategy>(
      static_cast<std::uint64_t>(number) + 1, row_modules_of(c));
  run.edit = [strategy, inner = std::move(run.edit)](TrainerParts& parts) {
    if (inner) inner(parts);
    parts.strategy = strategy;
  };
  return run;
}

}  // namespace

std::vector<std::int64_t> random_cuts(std::uint64_t seed, std::string_view name, std::int64_t size,
                                      std::int64_t pieces) {
  std::set<std::int64_t> cuts{0, size};
  const auto most = static_cast<std::uint64_t>(std::min(pieces, size));
  if (most >= 2) {
    const std::uint64_t wanted = 2 + drawn(seed, name, 0) % (most - 1);
    for (std::uint64_t i = 1; i < wanted; ++i)
      cuts.insert(1 + static_cast<std::int64_t>(drawn(seed, name, i) %
                                                static_cast<std::uint64_t>(size - 1)));
  }
  return {cuts.begin(), cuts.end()};
}

std::vector<std::int64_t> RedrawnStrategy::cuts(std::string_view module, CutDim dim,
                                                std::int64_t size) const {
  const std::string name(module);
  switch (dim) {
    case CutDim::kTokens:
      return random_cuts(seed_, name + " tokens", size, kMostPieces);
    case CutDim::kOutputs:
      return random_cuts(seed_, name + " outputs", size, kMostPieces);
    case CutDim::kInputs:
      break;
  }
  return random_cuts(seed_, name + " inputs", size,
                     row_modules_.contains(module) ? kMostPieces : 1);
}

std::vector<std::size_t> RedrawnStrategy::order(std::string_view module, std::size_t pieces) const {
  return random_order(seed_, module, pieces);
}

std::set<std::string, std::less<>> row_modules_of(const Case& c) {
  constexpr std::string_view kWeight = ".weight";
  std::set<std::string, std::less<>> modules;
  for (const ParameterSpec& spec : make_model(c.config, c.attention)->parameters()) {
    if (spec.tp.role == TpRole::kRow && spec.name.ends_with(kWeight))
      modules.insert(spec.name.substr(0, spec.name.size() - kWeight.size()));
  }
  return modules;
}

bool has_redrawn_runs(const Case& c) {
  return size_of(c.coarsest_dtype()) == 2 && !is_lattice(c);
}

void add_redrawn_runs(const Case& c, Reference& reference, int runs,
                      std::chrono::milliseconds deadline) {
  if (!has_redrawn_runs(c)) return;
  const CaseData data(c);
  const std::shared_ptr<const WeightSource> weights = case_weights(c);
  const int first = reference.redrawn().runs;
  std::vector<Trace> traces(static_cast<std::size_t>(std::max(0, runs - first)));
  std::vector<std::function<RunningRecord()>> starts;
  // No run sees the responses: it would mask by them.
  const Reference bare(reference.trace());
  for (int number = first; number < runs; ++number) {
    RunSpec spec = plain_spec(c, redrawn_run(c, data, weights, number));
    spec.name = fmt::format("{}_redrawn{}", c.reference_slug(), number);
    spec.deadline = case_deadline(c, deadline);
    spec.process_name = process_name("redrawn", number + 1);
    starts.emplace_back([&bare, spec = std::move(spec)] {
      return RunningRecord(
          default_launcher(), spec,
          {.reference = &bare, .keep = Keep::kNothing, .purpose = RunPurpose::kResponse});
    });
  }
  run_side_by_side<RunningRecord>(
      starts, [&](std::size_t run, RunningRecord& record) { traces[run] = record.wait(); });
  for (const Trace& trace : traces) reference.add_redrawn(trace);
}

}  // namespace isoshard
